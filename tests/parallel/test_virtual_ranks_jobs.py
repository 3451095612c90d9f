"""The same model on any number of ranks: ``train --virtual-ranks``. The long tier is the table of the documents."""

import pytest
from harness.tiers import thinned
from measure import same_bits

EVERYDAY = ("3 on nodes 0,0,1", "2, resumed on 3")


# test_virtual_ranks.py asks both MPI libraries for the bits
@pytest.mark.parametrize("row", thinned(same_bits.ROWS, "net, AdamW"))
def test_model_and_metrics_have_the_same_bits_on_any_number_of_ranks(tmp_path, request, row):
    found = same_bits.measure(row, same_bits.WAYS if request.config.getoption("long") else EVERYDAY, tmp_path)
    assert len(set(found.values())) == 1, found
