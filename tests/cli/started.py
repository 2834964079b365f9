"""What a program sees that `hf-domino run` started. Arguments: folders of the target, a copy of it, another model."""

import subprocess
import sys
import threading

import torch
from transformers import AutoModelForCausalLM

PROMPT = torch.tensor([[5, 9, 33, 20, 7, 41]])
SAMPLED = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 24}


def text_of(model, **options):
    """Text of a call with a seed, and the generator's state behind it."""
    torch.manual_seed(3)
    output = model.generate(PROMPT, **SAMPLED | options)
    return output.tolist(), torch.get_rng_state().tolist()


assert "hf_domino" in sys.modules
hf_domino = sys.modules["hf_domino"]  # nobody imports it here
target, copied, other = (AutoModelForCausalLM.from_pretrained(folder) for folder in sys.argv[1:])
assert [hf_domino.attached(model) for model in (target, copied, other)] == [None] * 3

with hf_domino.plain():
    plain = text_of(target)
    assert hf_domino.attached(target) is None
with torch.inference_mode():  # in which the drafter is loaded
    assert text_of(target) == plain
assert text_of(target) == plain
assert hf_domino.attached(target).num_drafted == 2

with hf_domino.plain():
    without = text_of(other)
assert text_of(other) == text_of(other) == without != plain
assert hf_domino.attached(other) is None

threads = [threading.Thread(target=lambda: text_of(copied, do_sample=False)) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert hf_domino.attached(copied).num_drafted == 4
hf_domino.detach(copied)
assert text_of(copied) == plain
assert hf_domino.attached(copied) is None
hf_domino.attach(other, hf_domino.attached(target).drafter)
assert text_of(other) == without
assert hf_domino.attached(other).num_drafted == 1

ask = "import sys; print('hf_domino' in sys.modules, 'torch' in sys.modules)"
child = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
assert child.stdout.endswith("True False\n")
print("all as it should be")
sys.exit(7)
