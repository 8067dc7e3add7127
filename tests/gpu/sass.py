"""Compile the decode kernel without a GPU and count what came out. `python tests/gpu/sass.py` prints a table.

Counting rule: of all innermost loops of the kernel the longest is the one over packed tiles; every SASS instruction
between its label and its backward branch counts, whatever it does (loads, waits, addresses, softmax, rescaling,
predicated ones). One pass handles one tile of 64 tokens, keys and values: `2 * 64 * D` codes, `32 * num_warps` threads.

    instructions per code = instructions in the loop * threads / codes of one pass
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from hf_kvcache.ops.attention import Extras
from hf_kvcache.ops.decode_attention.dispatch import PackedRows
from hf_kvcache.ops.packed import Format, Packed, codes_shape

TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


def packed_rows(
    bits: int, dim: int, length: int, heads: int = 2, axis: str = "channel", kind: str = "affine", group: int = 32,
    value_group: int = 32,
) -> PackedRows:  # fmt: skip
    """Packed tensors of the right shape, full of zeros."""
    levels = tuple(float(i) for i in range(2**bits)) if kind == "codebook" else None
    kf, vf = Format(bits, axis, group, kind, levels), Format(bits, "token", value_group, kind, levels)
    shape = (1, heads, length, dim)

    def one(fmt: Format, role: str) -> Packed:
        codes = torch.zeros(codes_shape(shape, bits, role, 32), dtype=torch.uint8)
        groups = (length // fmt.group, dim) if fmt.axis == "channel" else (length, dim // fmt.group)
        scale = torch.zeros(1, heads, *groups, dtype=torch.float16)
        return Packed(codes, scale, scale.clone() if fmt.has_zero else None)

    return PackedRows(one(kf, "keys"), one(vf, "values"), kf, vf, length, 32)


def compile_launch(launch: Any, capability: int, **options: int) -> Any:
    """The compiled kernel of a launch, specialised as a call on a GPU would be."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = list(inspect.signature(launch.kernel.fn).parameters)
    constants = {p.name for p in launch.kernel.params if p.is_constexpr}
    changing = {p.name for p in launch.kernel.params if p.do_not_specialize}
    signature, constexprs, attrs = {}, {}, {}
    for index, name in enumerate(names):
        value = launch.args[name]
        if name in constants or (type(value) is int and value == 1 and name not in changing):
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0 and name not in changing:
                attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constexprs, attrs)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options | options)


class Recorded(NamedTuple):
    """A call of a kernel, with its arguments by name."""

    kernel: Any
    args: dict[str, Any]
    options: dict[str, int]


def record(function: Callable[[], Any]) -> list[Recorded]:
    """The kernels that `function` would start."""
    from triton.runtime.jit import JITFunction

    calls: list[Recorded] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [p.name for p in self.params]
        given = dict(zip(names, args, strict=False)) | kwargs
        calls.append(Recorded(self, {k: v for k, v in given.items() if k in names}, {"num_warps": given["num_warps"]}))

    original, JITFunction.run = JITFunction.run, note
    try:
        function()
    finally:
        JITFunction.run = original
    return calls


def decode_variants() -> dict[str, Any]:
    """What else the decode kernel can be asked for."""
    from hf_kvcache.ops.decode_attention.triton import plan

    query, exact = torch.zeros(1, 4, 3, 128, dtype=torch.bfloat16), torch.zeros(1, 2, 96, 128, dtype=torch.bfloat16)
    pair, wide = (exact, exact), (exact.float(), exact.float())
    per_token = dict(axis="token", group=128, value_group=128)
    rows = packed_rows(4, 128, 4096)
    mask, bias = torch.ones(1, 1, 3, 4288, dtype=torch.bool), torch.zeros(1, 4, 3, 4288)
    lengths, table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 16, dtype=torch.int32)
    extras, capped = Extras(1.0), Extras(1.0, 30.0, torch.zeros(4))
    turned = packed_rows(4, 128, 4096, kind="symmetric", **per_token)._replace(
        key_turn=torch.eye(128)[None], value_turn=torch.eye(128)[None], key_mean=torch.zeros(1, 2, 128)
    )
    every = dict(lengths=lengths, tail_lengths=lengths, block_table=table, page_tiles=4)
    steps: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "exact rows alone": ((query, pair, None, pair, extras, mask[..., :192]), {}),
        "exact float32": ((query.float(), None, rows, wide, extras), {}),
        "everything": ((query, pair, rows, pair, capped, mask, bias, True), every),
        "turned": ((query, pair, turned, pair, extras), {}),
        "codebook": ((query, None, packed_rows(3, 128, 4096, kind="codebook", **per_token), pair, extras), {}),
        "float8 by channel": ((query, None, packed_rows(8, 128, 4096, kind="float8"), pair, extras), {}),
        "groups by token": ((query, None, packed_rows(2, 128, 4096, axis="token", group=64), pair, extras), {}),
    }
    return {
        f"decode variant: {name}": plan(*arguments, target="sm_90", inline_asm=True, **options)[0][0]
        for name, (arguments, options) in steps.items()
    }


def other_kernels(capability: int) -> dict[str, dict[str, int]]:
    """Registers, stack and shared memory of every kernel but the decode kernel."""
    from hf_kvcache.ops.column_sums import triton as column_sums
    from hf_kvcache.ops.decode_attention import triton as decode
    from hf_kvcache.ops.dequantize import triton as dequantize
    from hf_kvcache.ops.gather_rows import triton as gather_rows
    from hf_kvcache.ops.quantize_pack import triton as quantize_pack

    x = torch.zeros(1, 2, 256, 128, dtype=torch.bfloat16)
    formats = [Format(2, "channel", 32), Format(3, "token", 32), Format(8, "token", 32)]
    formats.append(Format(4, "token", 128, "symmetric"))
    index = torch.zeros(1, 2, 70, dtype=torch.int64)
    mask = torch.ones(1, 1, 256, 256, dtype=torch.bool)
    query = torch.zeros(1, 8, 256, 128, dtype=torch.bfloat16)
    launches, _ = decode.plan(query[:, :, :1], None, packed_rows(4, 128, 4096), (x, x), Extras(1.0), need_lse=True)
    calls: dict[str, Any] = {"merge": launches[1]} | decode_variants()
    for fmt in formats:
        for role in ("keys", "values"):
            name = f"{fmt.kind}{fmt.bits} {role}"
            rows = packed_rows(fmt.bits, 128, 256, 2, fmt.axis, fmt.kind, fmt.group, fmt.group)
            packed = rows.keys if role == "keys" or fmt.axis == "channel" else rows.values
            found = record(lambda f=fmt, r=role: quantize_pack.quantize_pack(x, f, r))
            calls |= {f"quantize_pack {name} {i}": call for i, call in enumerate(found)}
            if fmt.axis == "channel" and role == "values":
                continue
            found = record(lambda p=packed, f=fmt, r=role: dequantize.dequantize(p, f, r, 128, 200, torch.bfloat16))
            calls[f"dequantize {name}"] = found[0]
            if fmt.per_token:
                found = record(lambda p=packed, f=fmt, r=role: gather_rows.gather_rows(p, f, r, 128, index))
                calls[f"gather_rows {name}"] = found[0]
    found = record(lambda: column_sums.column_sums(query, x, Extras(1.0), lambda a, b: mask[:, :, a:b]))
    calls |= {f"column_sums {i}": call for i, call in enumerate(found)}
    results = {}
    for name, call in calls.items():
        compiled = compile_launch(call, capability)
        registers, stack = resources(compiled.asm["cubin"])
        results[name] = {"registers": registers, "stack": stack, "shared": compiled.metadata.shared}
    return results


def tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def run_tool(name: str, arguments: list[str], cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([tool(name), *arguments, str(file)], capture_output=True, text=True, check=True)
    return done.stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: there is none unless registers spill."""
    usage = run_tool("cuobjdump", ["--dump-resource-usage"], cubin)
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def loops(sass: str) -> list[list[str]]:
    """Instructions of every innermost loop."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    spans: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(found[1].strip())
            branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", found[1])
            if branch and labels.get(branch[1], len(instructions)) < len(instructions) - 1:
                spans.append((labels[branch[1]], len(instructions)))
    inner = [s for s in spans if not any(t != s and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
    return [instructions[a:b] for a, b in inner]


def opcode(instruction: str) -> str:
    return re.sub(r"^@!?U?P(\d+|T)\s+", "", instruction).split()[0].split(".")[0]


def measure(
    bits: int, capability: int, asm: bool, dim: int = 128, heads_per_group: int = 4, q_len: int = 1,
    dump: str | None = None, **formats: Any,
) -> dict[str, Any]:  # fmt: skip
    """Resources of the split kernel for one configuration, and the instructions of its loop over tiles."""
    from hf_kvcache.ops.decode_attention.triton import plan

    rows = packed_rows(bits, dim, 4096, **formats)
    exact = torch.zeros(1, 2, 128, dim, dtype=torch.bfloat16)
    query = torch.zeros(1, 2 * heads_per_group, q_len, dim, dtype=torch.bfloat16)
    launches, _ = plan(
        query, None, rows, (exact, exact), Extras(dim**-0.5), target=f"sm_{capability}", inline_asm=asm
    )  # fmt: skip
    launch = launches[0]
    compiled = compile_launch(launch, capability)
    registers, stack = resources(compiled.asm["cubin"])
    sass = run_tool("nvdisasm", ["-c"], compiled.asm["cubin"])
    if dump:
        Path(dump).write_text(sass)
        Path(dump + ".ttgir").write_text(compiled.asm["ttgir"])
    body = max(loops(sass), key=len)
    counts = collections.Counter(opcode(i) for i in body)
    warps = launch.options["num_warps"]
    return {
        "bits": bits, "capability": capability, "asm": asm, "dim": dim, "rows": heads_per_group * q_len, "warps": warps,
        "registers": registers, "stack": stack,
        "spills": counts["LDL"] + counts["STL"], "shared": compiled.metadata.shared, "loop": len(body),
        "per_code": len(body) * 32 * warps / (2 * 64 * dim), "opcodes": dict(counts.most_common(14)), **formats,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, nargs="*", default=[2, 3, 4, 8])
    parser.add_argument("--capability", type=int, nargs="*", default=[80, 90])
    parser.add_argument("--asm", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--q-len", type=int, default=1)
    parser.add_argument("--axis", default="channel")
    parser.add_argument("--kind", default="affine")
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--value-group", type=int, default=32)
    parser.add_argument("--others", action="store_true", help="the other kernels instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dump", help="a file for the disassembly of the last kernel")
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    if args.others:
        every = {f"sm_{c} {name}": row for c in args.capability for name, row in other_kernels(c).items()}
        print(json.dumps(every) if args.json else "\n".join(f"{name}: {row}" for name, row in every.items()))
        return
    found = []
    for capability in args.capability:
        for bits in args.bits:
            for asm in args.asm:
                row = measure(
                    bits, capability, bool(asm), args.dim, q_len=args.q_len, dump=args.dump, axis=args.axis,
                    kind=args.kind, group=args.group, value_group=args.value_group,
                )  # fmt: skip
                found.append(row)
                if not args.json:
                    keys = ("warps", "registers", "stack", "shared", "loop")
                    cells = " ".join(f"{k} {row[k]:5d}" for k in keys)
                    head = f"sm_{capability} {bits}-bit asm={asm} {cells}  per code {row['per_code']:.2f}"
                    print(head, row["opcodes"])
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
