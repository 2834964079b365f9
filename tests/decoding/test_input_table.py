"""Input products by token: right, computed once, and bounded."""

import torch
from builders import build_drafter

from hf_domino.decoding.correcting.input_table import InputTable
from hf_domino.target.view import TargetModel


class CountingGRU:
    def __init__(self, gru):
        self.gru, self.hidden_size, self.weight_ih_l0, self.seen = gru, gru.hidden_size, gru.weight_ih_l0, []

    def project_inputs(self, embeds):
        self.seen.append(len(embeds))
        return self.gru.project_inputs(embeds)


@torch.no_grad()
def test_every_token_is_computed_once_and_the_table_stays_bounded(tiny_qwen3):
    drafter = build_drafter(tiny_qwen3)
    target, gru = TargetModel(tiny_qwen3, drafter.config), CountingGRU(drafter.prefix_gru)
    num_bytes = 3 * gru.hidden_size * 4
    table = InputTable(gru, target, max_bytes=10 * num_bytes)
    table.add([5, 6, 5, 7])
    table.rows([6])
    assert gru.seen == [3]
    assert table.num_bytes == 3 * num_bytes
    for token_ids in ([5, 9, 6, 9], [7], list(range(20, 28)), [5, 20], list(range(30, 42)), [20]):
        expected = drafter.prefix_gru.project_inputs(target.embed(torch.tensor(token_ids)))
        torch.testing.assert_close(table.rows(token_ids), expected)
        assert table.num_bytes <= 10 * num_bytes
    # When 8 more did not fit, all that was kept went; of 12 at once, 10 were kept and all computed for themselves.
    assert gru.seen == [3, 1, 8, 1, 10, 12, 1]
