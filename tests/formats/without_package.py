"""Run by the tests in a process of its own, where this package cannot be imported: bundles against plain `generate`.

Arguments: the target's folder, then what `custom_generate` is to be, one after the other.
"""

import importlib.util
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

HIDDEN = ("hf_domino", "domino_kernels", "triton", "accelerate", "peft", "rich")


class Hiding(PathFinder):
    """The finder of sys.path, without these; those of editable installs are left out."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Hiding]

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer  # noqa: E402

torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
one, batch = (tokenizer(texts, return_tensors="pt", padding=True) for texts in (["def f(a):"], ["def f(a):", "x = "]))
OPTIONS = {"max_new_tokens": 12, "return_dict_in_generate": True}
last = target.generate(**one, **OPTIONS, do_sample=False).sequences[0, -1:]
calls = [
    one | {"do_sample": False},
    one | {"do_sample": True, "temperature": 0.8, "top_k": 20},
    batch | {"do_sample": False},
    batch | {"do_sample": True, "num_return_sequences": 2},
    one | {"do_sample": False, "stop_strings": tokenizer.batch_decode(last), "tokenizer": tokenizer},
]
for name in sys.argv[2:]:
    for call in calls if name == sys.argv[2] else calls[1:3]:
        torch.manual_seed(7)
        plain = target.generate(**call, **OPTIONS).sequences
        torch.manual_seed(7)
        assisted = target.generate(**call, **OPTIONS, custom_generate=name, trust_remote_code=True)
        assert torch.equal(plain, assisted.sequences), (name, call)
        assert assisted.stats.num_new_tokens > 0, name
    streamer = TextIteratorStreamer(tokenizer)
    text = target.generate(**one, max_new_tokens=12, streamer=streamer, custom_generate=name, trust_remote_code=True)
    assert "".join(streamer) == tokenizer.decode(text[0])
    assert 0 < streamer.stats.num_rounds < streamer.stats.num_new_tokens == 12
    target.generation_config.stop_strings = tokenizer.batch_decode(last)  # Transformers asks for the tokenizer then
    stopped = {"tokenizer": tokenizer, "max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**one, **stopped)
    assert torch.equal(target.generate(**one, **stopped, custom_generate=name, trust_remote_code=True), plain)
    target.generation_config.stop_strings = None
    another = {"custom_generate": name, "drafter": "user/another", "trust_remote_code": True}
    assert torch.equal(target.generate(**one, max_new_tokens=12, **another), text)
    generate = target.load_custom_generate(name, trust_remote_code=True)
    assert torch.equal(generate(target, **one, max_new_tokens=12, drafter=name), text)

assert all(importlib.util.find_spec(name) is None for name in HIDDEN)
assert not {name.partition(".")[0] for name in sys.modules} & set(HIDDEN)
print("all equal")
