"""Targets: their files, their laws, and what a bad file is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepgraph.errors import InputError
from stepgraph.hwtargets import load_target, target_names
from stepgraph.hwtargets.efficiency import eta_constant, eta_shape_gemm, eta_shape_sdpa
from stepgraph.hwtargets.links import (
    GroupGeometry,
    all_to_all_s,
    alpha,
    group_geometry,
    point_to_point_s,
    ring_s,
)
from stepgraph.hwtargets.schema import STATUSES
from stepgraph.hwtargets.target import Target

MIB = 2**20
GOOD = '{ value = 1.0, source = "measured on our own cluster", status = "measured" }'


@pytest.fixture(scope="module")
def h100() -> Target:
    return load_target("h100")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def told(path: Path) -> dict[str, str]:
    """Code and message of every problem that the file has, by the dotted key (or the path)."""
    with pytest.raises(InputError) as caught:
        load_target(path)
    return {p.where.removeprefix(f"{path}: "): f"{p.code} {p}" for p in caught.value.problems}


# --- the files that come with the package


def test_names() -> None:
    assert target_names() == ("a100-40", "a100-80", "b200", "gb200", "h100", "h200", "mi300x")
    assert tuple(load_target(name).name for name in target_names()) == target_names()
    assert load_target("H100") == load_target("h100")
    assert hash(load_target("H100")) == hash(load_target("h100"))


@pytest.mark.parametrize("name", target_names())
def test_every_figure_has_a_source(name: str) -> None:
    figures = load_target(name).figures()
    assert len(figures) >= 35
    for key, figure in figures:
        assert len(figure.source) > 15, key
        assert figure.status in STATUSES, key
        doubtful = figure.source.startswith(("unverified", "conflicting", "borrowed", "no measurement"))
        assert not doubtful or figure.status == "assumed", key


def test_records_agree_with_figures(h100: Target) -> None:
    figures = dict(h100.figures())
    assert figures["hbm.size_bytes"].value == h100.hbm.size_bytes == 80 * 2**30
    assert figures["nic.alpha"].status == "assumed"  # the generic default, said as such
    assert "nic.alpha" in dict(load_target("mi300x").figures())


def test_peaks(h100: Target) -> None:
    assert h100.peak_flops_per_s("bf16") == 989.4e12
    assert h100.peak_flops_per_s("fp8") == 2 * 989.4e12 + 0.2e12
    with pytest.raises(InputError, match="a100-80 has no peak for 'fp8'; expected one of bf16, fp16, tf32, fp32"):
        load_target("a100-80").peak_flops_per_s("fp8")


def test_reachable_bandwidth(h100: Target) -> None:
    assert h100.hbm.effective_bytes_per_s == pytest.approx(3350e9 * 0.88)


# --- efficiency


def test_constants(h100: Target) -> None:
    assert [eta_constant(h100, "qkv", role) for role in ("fwd", "dx", "dw")] == [0.80, 0.80, 0.77]
    assert eta_constant(h100, "experts_up", "fwd") == eta_constant(h100, "anything", "dw") == 0.74
    assert eta_constant(load_target("mi300x"), "qkv", "fwd") == 0.52
    assert eta_constant(h100, "sdpa", "fwd") == pytest.approx(0.628 / (1 + 716 / 4096), abs=5e-4)
    assert eta_constant(h100, "sdpa", "dw") == eta_constant(h100, "sdpa", "dx")


def with_fixed_cost(target: Target, m: int, n: int, k: int, role: str) -> float:
    """The published tables count the fixed cost of the kernel; the law here leaves it to the launch gap."""
    is_dw = role == "dw"
    eta = eta_shape_gemm(target, m, n, k, role=role, out_bytes=4 if is_dw else 2, accumulate=is_dw)
    ideal_s = 2 * m * n * k / target.peak_flops_per_s("bf16")
    return ideal_s / (ideal_s / eta + target.launch.gap_s)


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "role", "table"),
    [
        ("h100", 8192, 6144, 4096, "fwd", 0.80),  # qkv of an 8B model, 8192 tokens
        ("h100", 6144, 4096, 8192, "dw", 0.77),
        ("a100-80", 8192, 28672, 4096, "fwd", 0.84),  # gate and up
        ("b200", 8192, 14336, 4096, "dx", 0.69),  # dX of the down projection: 256 x 256 tiles
        ("gb200", 8192, 64, 4096, "fwd", 0.12),  # router
    ],
)
def test_shape_law_gives_the_table(name: str, m: int, n: int, k: int, role: str, table: float) -> None:
    assert with_fixed_cost(load_target(name), m, n, k, role) == pytest.approx(table, abs=0.01)


def test_shape_law_by_hand(h100: Target) -> None:
    """132 x 2 tiles of 256 x 128 fill two waves exactly; nothing else is faster, memory is far behind."""
    m, n, k = 256 * 132, 128 * 2, 8192
    rate = 989.4e12 * 0.8633 / (1 + 1.4706 * (1 / 256 + 1 / 128))
    tiles_s = 2 * 132 * 256 * 128 * 2 * (k + 117.7201) / rate
    memory_s = (2 * (m * k + k * n) + 2 * m * n) / (0.8554 * 3350e9)
    t_s = (tiles_s**3 + memory_s**3) ** (1 / 3)
    assert t_s < 0.5e-3  # so no droop
    assert eta_shape_gemm(h100, m, n, k, role="fwd") == pytest.approx(2 * m * n * k / (989.4e12 * t_s))


def test_one_more_row_costs_a_wave(h100: Target) -> None:
    full = eta_shape_gemm(h100, 256 * 33, 128 * 4, 8192, role="fwd")
    spilled = eta_shape_gemm(h100, 256 * 33 + 1, 128 * 4, 8192, role="fwd")
    assert spilled < 0.95 * full


def test_groups_share_the_last_wave(h100: Target) -> None:
    alone = eta_shape_gemm(h100, 512, 1408, 2048, role="fwd")
    together = eta_shape_gemm(h100, 512, 1408, 2048, role="fwd", groups=8)
    assert together > alone


def test_attention_law(h100: Target) -> None:
    assert eta_shape_sdpa(h100, 716, 128, "fwd") == pytest.approx(0.628 / 2)
    assert eta_shape_sdpa(h100, 768, 64, "fwd") == pytest.approx(0.504 / 2)
    assert eta_shape_sdpa(h100, 300, 128, "dx") == eta_shape_sdpa(h100, 300, 64, "dw") == pytest.approx(0.58 / 2)


def test_bad_questions(h100: Target) -> None:
    with pytest.raises(InputError, match="fwd, dx or dw"):
        eta_constant(h100, "qkv", "forward")
    with pytest.raises(InputError, match="at least 1"):
        eta_shape_gemm(h100, 0, 1, 1, role="fwd")
    with pytest.raises(InputError, match="fwd, dx or dw"):
        eta_shape_sdpa(h100, 4096, 128, "backward")
    with pytest.raises(InputError, match="at least 1"):
        eta_shape_sdpa(h100, 0, 128, "fwd")


# --- links


def test_geometry() -> None:
    assert group_geometry(range(8), 8) == GroupGeometry(size=8, ranks_per_domain=8, domains=1)
    assert group_geometry((0, 4, 8, 12), 8) == GroupGeometry(size=4, ranks_per_domain=2, domains=2)
    assert group_geometry((0, 8, 16), 8) == GroupGeometry(size=3, ranks_per_domain=1, domains=3)
    assert group_geometry(range(12), 8) == GroupGeometry(size=12, ranks_per_domain=4, domains=2)  # the fewest count
    for offsets, domain in (((), 8), ((0, 0), 8), ((0,), 0)):
        with pytest.raises(InputError, match="distinct offsets"):
            group_geometry(offsets, domain)


def test_alpha_break_points_are_inclusive(h100: Target) -> None:
    assert [alpha(h100.scale_up, s) for s in (0, MIB, MIB + 1, 16 * MIB, 128 * MIB, 1e12)] == [
        *(0.39, 0.39, 0.46),
        *(0.46, 0.64, 0.71),
    ]
    assert [alpha(h100.nic, s) for s in (32768, 32769, MIB, MIB + 1)] == [0.5, 0.7, 0.7, 0.9]


def test_ring_inside_a_domain_meets_the_measurement(h100: Target) -> None:
    """All-gather of 64 MiB on 8 GPUs: nccl-tests read a bus bandwidth of 281 GB/s."""
    size, time_s = 64 * MIB, ring_s(h100, group_geometry(range(8), 8), 64 * MIB)
    assert time_s == pytest.approx(5.6e-6 + 7 * 0.79e-6 + 7 / 8 * size / (0.64 * 450e9))
    assert 7 / 8 * size / time_s / 1e9 == pytest.approx(281, rel=0.2)


def test_ring_across_domains_uses_the_nics_of_its_ranks(h100: Target) -> None:
    size = 64 * MIB
    one_per_node = ring_s(h100, group_geometry((0, 8, 16, 24), 8), size)
    assert one_per_node == pytest.approx(3 * 5e-6 + 3 / 4 * size / (0.9 * 50e9))
    two_per_node = ring_s(h100, group_geometry((0, 4, 8, 12), 8), size)
    assert two_per_node == pytest.approx(3 * 5e-6 + 3 / 4 * size / (0.9 * 2 * 50e9))
    whole_nodes = ring_s(h100, group_geometry(range(16), 8), size)
    # eight NICs would carry 0.9 x 400 GB/s, but the part inside a node reaches 0.64 x 450
    assert whole_nodes == pytest.approx(15 * 5e-6 + 15 / 16 * size / (0.64 * 450e9))


def test_ring_is_never_faster_than_its_part_inside_a_domain() -> None:
    gb200 = load_target("gb200")  # 72 ranks x 50 GB/s would be 3600 GB/s, the link has 900 and reaches 0.57 of it
    expected = 143 * 5e-6 + 143 / 144 * MIB * 64 / (0.57 * 900e9)
    assert ring_s(gb200, group_geometry(range(144), 72), 64 * MIB) == pytest.approx(expected)


def test_one_rank_alone_in_its_domain_holds_the_ring_up(h100: Target) -> None:
    eight, nine = (ring_s(h100, group_geometry(range(ranks), 8), 64 * MIB) for ranks in (8, 9))
    assert nine == pytest.approx(8 * 5e-6 + 8 / 9 * 64 * MIB / (0.9 * 50e9))
    assert nine > eight


@pytest.mark.parametrize("name", target_names())
def test_time_never_falls_as_the_message_grows(name: str) -> None:
    target = load_target(name)
    sizes = [MIB * 2 ** (i / 16) for i in range(-128, 192)]
    for geometry in (group_geometry(range(8), 8), group_geometry((0, 8, 16), 8)):
        for law in (ring_s, all_to_all_s):
            times = [law(target, geometry, size) for size in sizes]
            assert times == sorted(times)


def test_all_to_all(h100: Target) -> None:
    size = 64 * MIB
    inside = all_to_all_s(h100, group_geometry(range(8), 8), size)
    assert inside == pytest.approx(5.6e-6 + 7 * 0.79e-6 + size * 7 / 8 / (0.64 * 450e9))
    across = all_to_all_s(h100, group_geometry(range(16), 8), size)  # half of S leaves the node, one NIC per GPU
    assert across == pytest.approx(15 * 5e-6 + size * 8 / 16 / (0.9 * 50e9))
    gb200 = load_target("gb200")  # the 73rd rank is alone in its domain: all it sends leaves through its NIC
    alone = all_to_all_s(gb200, group_geometry(range(73), 72), size)
    assert alone == pytest.approx(72 * 5e-6 + size * 72 / 73 / (0.9 * 50e9))


def test_point_to_point(h100: Target) -> None:
    assert point_to_point_s(h100, False, MIB) == pytest.approx(5.6e-6 + 0.79e-6 + MIB / (0.39 * 450e9))
    assert point_to_point_s(h100, True, MIB) == pytest.approx(5e-6 + MIB / (0.7 * 50e9))


def test_a_group_of_one_is_free(h100: Target) -> None:
    alone = group_geometry((0,), 8)
    assert ring_s(h100, alone, MIB) == all_to_all_s(h100, alone, MIB) == 0.0


# --- a user's file


def test_base_with_overrides(tmp_path: Path, h100: Target) -> None:
    text = f'base = "H100"\n[hbm]\nreachable_fraction = {GOOD}\n[eta.constant.experts_up]\n'
    path = write(tmp_path, text + "".join(f"{role} = {GOOD}\n" for role in ("fwd", "dx", "dw")))
    mine = load_target(path)
    assert (mine.name, mine.title) == ("mine", "NVIDIA H100 SXM5 80 GB, changed by mine.toml")
    assert mine.hbm.effective_bytes_per_s == h100.hbm.bandwidth_bytes_per_s == 3350e9
    assert (eta_constant(mine, "experts_up", "fwd"), eta_constant(mine, "qkv", "fwd")) == (1.0, 0.80)
    assert dict(mine.figures())["hbm.reachable_fraction"].source == "measured on our own cluster"


def test_one_role_of_an_inherited_op(tmp_path: Path) -> None:
    mine = load_target(write(tmp_path, f'base = "h100"\nname = "ours"\n[eta.constant.qkv]\ndw = {GOOD}\n'))
    assert mine.name == "ours"
    assert [eta_constant(mine, "qkv", role) for role in ("fwd", "dx", "dw")] == [0.80, 0.80, 1.0]


def test_complete_file_without_base(tmp_path: Path, h100: Target) -> None:
    shipped = Path(__file__).parents[1] / "hwtargets" / "data" / "h100.toml"
    assert load_target(write(tmp_path, shipped.read_text())) == h100
    other = tmp_path / "no_ending"  # any existing file will do
    other.write_bytes(b"\xef\xbb\xbf" + shipped.read_bytes().replace(b"\n", b"\r\n"))
    assert load_target(other) == h100


def test_break_points_may_end_without_infinity(tmp_path: Path) -> None:
    figure = '{ value = [[1024, 0.2], [0.6]], source = "our own cluster", status = "fitted" }'
    mine = load_target(write(tmp_path, f'base = "h100"\n[nic]\nalpha = {figure}\n'))
    assert [alpha(mine.nic, s) for s in (1024, 1025, 1e15)] == [0.2, 0.6, 0.6]


# --- bad input: everything at once, each with its place


def test_unknown_names() -> None:
    with pytest.raises(InputError, match=r"unknown target 'h10'.*'h100'"):
        load_target("h10")
    with pytest.raises(InputError, match="one of a100-40"):
        load_target("")
    with pytest.raises(InputError, match="unknown target"):
        load_target("x" * 5000)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this is a directory"):
        load_target(tmp_path)
    with pytest.raises(InputError, match="No such file"):
        load_target(tmp_path / "none.toml")
    with pytest.raises(InputError, match="cannot be read"):
        load_target("a\0b.toml")
    big = tmp_path / "big.toml"
    big.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InputError, match="larger than 1 MiB"):
        load_target(big)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a = 1\nb = \n", "line 2"),
        (b"a = 1\na = 2\n", "line 2"),
        (b"name = '\xff'\n", "utf-8"),
        (b"a = " + b"[" * 5000, "not valid TOML"),
        (b"a = " + b"9" * 5000, "not valid TOML"),
    ],
)
def test_not_toml(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        load_target(path)


def test_all_problems_at_once(tmp_path: Path) -> None:
    text = """base = "h100"
    nname = "x"
    [hbm]
    size_bytes = 80e9
    bandwidth_bytes_per_s = { value = "3.35 TB/s", source = "vendor", status = "spec" }
    reachable_fracton = { value = 0.9, source = "ours", status = "measured" }
    reachable_fraction = { value = 1.3, source = "ours", status = "measured" }
    [compute]
    sms = { value = true, source = "vendor", status = "spec" }
    l2_bytes = { value = 0, source = " ", status = "guess", note = "?" }
    [scale_up]
    domain = { value = 7.5, source = "vendor", status = "spec" }
    t0_s = { value = -1e-6, source = "vendor", status = "spec" }
    [launch]
    gap_s = { source = "vendor", status = "measure" }
    [eta]
    shape = 3
    """
    problems = told(write(tmp_path, text))
    assert problems.keys() == {
        *("nname", "hbm.size_bytes", "hbm.bandwidth_bytes_per_s", "hbm.reachable_fracton", "hbm.reachable_fraction"),
        *("compute.sms", "compute.l2_bytes", "scale_up.domain", "scale_up.t0_s", "launch.gap_s", "eta.shape"),
    }
    assert "did you mean 'name'" in problems["nname"].lower()
    assert "did you mean 'reachable_fraction'" in problems["hbm.reachable_fracton"].lower()
    assert "{ value = ..., source = ..., status = ... }" in problems["hbm.size_bytes"]
    assert "value is '3.35 TB/s'; expected a rate per second from 1e8 to 1e19" in problems["hbm.bandwidth_bytes_per_s"]
    assert "value is 1.3; expected a number above 0 and at most 1.2" in problems["hbm.reachable_fraction"]
    assert "value is True; expected a whole number" in problems["compute.sms"]
    assert "value is 7.5; expected a whole number" in problems["scale_up.domain"]
    assert "seconds from 0 to 1" in problems["scale_up.t0_s"]
    assert "a table [eta.shape]" in problems["eta.shape"]


def test_every_part_of_a_figure_is_checked(tmp_path: Path) -> None:
    figure = '{ value = 0, source = " ", status = "measure", note = "?" }'
    with pytest.raises(InputError) as caught:
        load_target(write(tmp_path, f'base = "h100"\n[compute]\nl2_bytes = {figure}\n'))
    assert {p.code for p in caught.value.problems} == {"target-key", "target-source", "target-status", "target-value"}
    assert "Did you mean 'measured'" in str(caught.value)


@pytest.mark.parametrize("value", ["nan", "inf", "1" + "0" * 400, "[1]", "1979-05-27", '"1"', "false"])
def test_not_a_number(tmp_path: Path, value: str) -> None:
    figure = f'{{ value = {value}, source = "vendor", status = "spec" }}'
    assert "target-value" in told(write(tmp_path, f'base = "h100"\n[hbm]\nsize_bytes = {figure}\n'))["hbm.size_bytes"]


@pytest.mark.parametrize(
    "value",
    [
        *("0.5", "[]", "[0.5]", "[[1024, 0.5]]", "[[1024, 0.5, 1], [inf, 0.9]]", "[[1024, 0.0], [inf, 0.9]]"),
        *("[[2048, 0.5], [1024, 0.6], [inf, 0.9]]", "[[1024, 0.5], [1024, 0.6], [0.9]]", "[[inf, true]]", "[[]]"),
    ],
)
def test_bad_break_points(tmp_path: Path, value: str) -> None:
    figure = f'{{ value = {value}, source = "vendor", status = "fitted" }}'
    assert "up_to_bytes" in told(write(tmp_path, f'base = "h100"\n[nic]\nalpha = {figure}\n'))["nic.alpha"]


def test_missing_figures(tmp_path: Path) -> None:
    problems = told(write(tmp_path, f"[hbm]\nreachable_fraction = {GOOD}\n[eta.constant.qkv]\nfwd = {GOOD}\n"))
    assert {"title", "peak_flops_per_s.bf16", "nic.t0_s", "launch.gap_s", "eta.constant.sdpa.fwd"} <= problems.keys()
    assert {"eta.constant.qkv.dx", "eta.constant.qkv.dw"} <= problems.keys()  # an op that is named needs all its roles
    optional = {
        "nic.alpha",
        "scale_up.alpha",
        "peak_flops_per_s.fp8",
        "eta.constant.router.fwd",
        "hbm.reachable_fraction",
    }
    assert not optional & problems.keys()


def test_bad_texts_and_base(tmp_path: Path) -> None:
    assert told(write(tmp_path, 'base = "h20"\n[hbm]\n')).keys() == {"base"}  # not a long list of missing figures
    assert "'h200'" in told(write(tmp_path, 'base = "h20"\n'))["base"]
    problems = told(write(tmp_path, 'base = 3\nname = ""\ntitle = true\n'))
    assert problems.keys() == {"base", "name", "title"}
