import argparse

import pytest

from mpiddp.bench.results import format_size, parse_size, size_range
from mpiddp.cli import build_parser
from mpiddp.training.config import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8", 8), ("1K", 1024), ("64k", 65536), ("1.5M", 3 << 19), ("2G", 2 << 30), ("4MiB", 4 << 20), ("7B", 7)],
)
def test_parse(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "M", "-8", "0", "1.3K", "8 T", "1e3", "0x10", "nan", "8K8"])
def test_parse_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a size is a number of bytes"):
        parse_size(text)


@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1536, 65536, 3 << 20, 5 << 30])
def test_text_of_exact_sizes_reads_back(size):
    assert parse_size(format_size(size)) == size


def test_sweep_grows_without_repeating():
    assert size_range(1, 10, 1.3) == [1, 2, 3, 4, 6, 8]
    assert size_range(8, 8, 2) == [8]
    assert size_range(3, 100, 4) == [3, 12, 48]


@pytest.mark.parametrize(("begin", "end", "factor"), [(8, 4, 2), (8, 16, 1), (8, 16, 0.5)])
def test_sweep_refuses(begin, end, factor):
    with pytest.raises(UsageError, match="sizes"):
        size_range(begin, end, factor)


def test_short_options_are_those_of_nccl_tests():
    given = ["bench", "all_reduce", "-b", "1K", "-e", "2M", "-f", "4", "-n", "7", "-w", "0"]
    found = build_parser().parse_args(given)
    assert isinstance(found, argparse.Namespace)
    expected = {"begin": 1024, "end": 2 << 20, "factor": 4.0, "iterations": 7, "warmup": 0}
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    "given", ["all_reduze", "all_reduce -b x", "all_reduce -n 0", "all_reduce --dtype object", "ddp -w 1", ""]
)
def test_options_that_make_no_sense_are_usage_errors(given):
    with pytest.raises(UsageError):
        build_parser().parse_args(["bench", *given.split()])
