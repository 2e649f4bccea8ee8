"""Runs kernels as compiled by NVRTC: each PTX instruction becomes a statement of C++ for the emulator.

`emulator.compile` runs the sources on the CPU, with its own replacement for the assembly in them. Here NVRTC has
compiled the sources, that assembly and CUDA's headers, and include/ptx.h defines each instruction according to the PTX
ISA. An instruction that it lacks does not compile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import emulator

ARCH = "compute_90"

NVRTC = all(find_spec(name) for name in ("cuda", "nvidia")) and find_spec("nvidia.cu13") is not None
"""Whether the wheels of NVRTC and of CUDA's headers are installed."""

REGISTERS = {".pred": "pred", ".b16": "u16", ".b32": "u32", ".u32": "u32", ".f32": "u32", ".b64": "u64", ".f64": "u64"}
"""Types of registers: bits, whatever they mean."""

SPECIAL = {
    "%tid.x": "threadIdx.x",
    "%ntid.x": "blockDim.x",
    "%ctaid.x": "blockIdx.x",
    "%nctaid.x": "gridDim.x",
    "%nctaid.z": "gridDim.z",
}

SPACES = {"shared": "Shared", "param": "Param", "global": "Global"}

MOVES = SPACES.keys() | {"v2", "v4", "cg", "cs"}
"""Modifiers of loads and stores before the type. Not .nc: such a load may miss writes by others while the kernel runs."""


def require() -> None:
    """Skips the test if NVRTC or a compiler is missing; with PAGODA_REQUIRE_EMULATOR=1 it fails."""
    emulator.require()
    if not NVRTC:
        emulator.lack("the wheels of NVRTC are not installed")


def compile(
    source: str,
    kernels: Mapping[str, str],
    constants: Mapping[str, str] | None = None,
    *,
    device_code: Path = emulator.DEVICE_CODE,
    arch: str = ARCH,
) -> emulator.Library:
    """Like `emulator.compile`, but through NVRTC. arch: the virtual architecture that it compiles for."""
    require()
    import compile_kernels

    known = [version("nvidia-cuda-nvrtc"), arch, *compile_kernels.OPTIONS, *emulator.contents(device_code)]

    def write(path: Path) -> None:
        text, names = compile_kernels.ptx(arch, source, list(kernels.values()), device_code)
        path.write_text(translated(text, dict(zip(kernels, names, strict=True))))

    own = Path(__file__).read_text()
    translation = emulator.kept("cpp", [own, source, *kernels, *kernels.values(), *known], write)
    library = emulator.Library(emulator.program(translation.read_text(), [], [], "-Og"))
    if constants:
        library.add(emulator.program(emulator.with_constants(source, constants), known, [f"-I{device_code}"], "-O0"))
    return library


def translated(text: str, names: Mapping[str, str]) -> str:
    """Translates kernels in PTX to a program for `emulator.program`. names: PTX entries by the names that they get."""
    symbols = dict.fromkeys(re.findall(r"\.extern \.shared \.align \d+ \.b8 (\w+)\[\]", text), "SHARED")
    program = ["#include <ptx.h>", "using namespace ptx;"]
    for name, entry in names.items():
        head = re.search(rf"\.entry {entry}\(\s*\.param \.align 8 \.b8 (\w+)\[(\d+)\]\s*\)", text)
        assert head is not None, "a kernel takes one structure"
        parameters = symbols | {head[1]: "reinterpret_cast<u64>(parameters.bytes)"}
        program += [
            f"struct Parameters_{name} {{ alignas(8) unsigned char bytes[{head[2]}]; }};",
            f"static void kernel_{name}([[maybe_unused]] Parameters_{name} parameters)",
            *_statements(_body(text[head.end() :]), parameters),
            f"LAUNCHER({name}, (kernel_{name}))",
        ]
    return "\n".join(program)


def _body(text: str) -> str:
    """The text from the first brace to the one that closes it."""
    start, depth = text.index("{"), 0
    for brace in re.finditer("[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.end()]
    raise AssertionError("a brace is not closed")


def _statements(body: str, symbols: Mapping[str, str]) -> Iterator[str]:
    body = re.sub(r"//[^\n]*|\.(pragma|loc|file)[^\n]*", "", body)
    # A brace at the beginning is a block's, others enclose operands.
    for part in re.findall(r"\$\w+:|[{}]|[^\s{};][^;]*;", body):
        if part in ("{", "}"):
            yield part
        elif part.endswith(":"):
            yield f"{_name(part[:-1])}:;"
        else:
            yield f"{_statement(' '.join(part[:-1].split()), symbols)};"


def _statement(text: str, symbols: Mapping[str, str]) -> str:
    if declared := re.fullmatch(r"\.reg (\.\w+) (%?\w+)(?:<(\d+)>)?", text):
        kind, name, count = REGISTERS[declared[1]], _name(declared[2]), declared[3]
        names = [f"{name}{i}" for i in range(int(count))] if count else [name]
        return f"[[maybe_unused]] {kind} {', '.join(f'{one} = POISON<{kind}>' for one in names)}"
    instruction = re.fullmatch(r"(?:@(!?%\w+) )?(\S+) ?(.*)", text)
    assert instruction is not None, text
    guard, opcode, rest = instruction.groups()
    operands = [_operand(operand, symbols) for operand in re.findall(r"\[[^\]]*\]|[^\s,{}|]+", rest)]
    if opcode[:4] == "mov." and rest[0] == "{":
        opcode = "unpack"
    return (f"if ({_name(guard)}) " if guard else "") + _call(opcode, operands)


def _call(opcode: str, operands: list[str]) -> str:
    # Prefetch hints for L2 change no bytes.
    root, *modifiers = re.sub(r"\.L2::\w+", "", opcode).split(".")
    if root == "bra":
        return f"goto {operands[0]}"
    if root == "ret":
        return "return"
    if root in ("ld", "st") and MOVES.issuperset(modifiers[:-1]):
        space = next((SPACES[modifier] for modifier in modifiers if modifier in SPACES), "Global")
        # Floats move as bits.
        kind = modifiers[-1].replace("f", "b")
        address, registers = (operands[-1], operands[:-1]) if root == "ld" else (operands[0], operands[1:])
        verb = "load" if root == "ld" else "store"
        return f"{verb}<{space}, {kind}>({', '.join([address, *registers])})"
    if "aligned" in modifiers:
        # The line identifies the instruction: each has its own.
        operands = ["__LINE__", *operands]
    name = "mov" if root == "mov" else "_".join([root, *modifiers])
    return f"{name}({', '.join(operands)})"


def _operand(text: str, symbols: Mapping[str, str]) -> str:
    if text.startswith("["):
        return " + ".join(_operand(part, symbols) for part in text[1:-1].split("+"))
    if text in SPECIAL:
        return SPECIAL[text]
    if number := re.fullmatch(r"0[fd]([0-9A-F]+)", text):
        return f"0x{number[1]}{'u' if len(number[1]) == 8 else 'ull'}"
    if re.fullmatch(r"-?\d+", text):
        return f"{text}ll"
    return symbols.get(text, _name(text))


def _name(text: str) -> str:
    return text.replace("%", "_").replace("$", "_")
