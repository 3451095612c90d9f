from harness.launcher import job


def test_hierarchical_keeps_few_pieces():
    done = job("peak", ranks=2, MPIDDP_NODES="0,1")
    peaks = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert done.rc == 0 and len(peaks) == 2 and max(peaks) < 16, done
