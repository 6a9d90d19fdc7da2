"""The PTX of kernels' ``asm`` statements as calls of what device.h declares, so that g++ compiles the same text."""

from __future__ import annotations

import re

#: How many bytes an operand of a constraint has, and what the constant is called that stands for an input.
CONSTRAINTS = {"r": (4, "ptx::u32"), "l": (8, "ptx::u64"), "h": (2, "ptx::u16"), "f": (4, "float"), "d": (8, "double"), "n": (4, "int")}
C_TYPES = {"b16": "ptx::u16", "b32": "ptx::u32", "b64": "ptx::u64", "u32": "ptx::u32", "s32": "int", "f32": "float", "f64": "double"}


def operands_of(text: str) -> list:
    """Operands, split at commas; those in brackets or braces are lists."""
    found: list = []
    for part in split(text, ","):
        part = part.strip()
        found.append(operands_of(part[1:-1]) if part[:1] in "[{" and part else part)
    return found


def split(text: str, at: str) -> list[str]:
    """`text`, split at a character that stands in no bracket and no string."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c == '"':
            i = string_end(text, i)
            continue
        depth += (c in "([{") - (c in ")]}")
        if c == at and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    return [*parts, text[start:]]


def string_end(text: str, i: int) -> int:
    """Behind the string or character that begins at `i`."""
    quote, i = text[i], i + 1
    while text[i] != quote:
        i += 1 + (text[i] == "\\")
    return i + 1


def array(name: str, kind: str, values: list[str]) -> str:
    return f"const {kind} {name}[] = {{{', '.join(values)}}};"


def references(name: str, kind: str, values: list[str]) -> str:
    return f"{kind}* const {name}[] = {{{', '.join(f'&{v}' for v in values)}}};"


def place(values: list[str]) -> str:
    return f"ptx::Place{{{len(values)}, {{{', '.join(f'(int){v}' for v in values)}}}}}"


def tensor_load(found: re.Match, to: list, of: list, barrier: list, offsets: list = ()) -> str:  # type: ignore[assignment]
    name, coordinates = of
    assert len(coordinates) == int(found[1]), "coordinates for each axis"
    if found[2] == "tile":
        return f"ptx::tensor_load({to[0]}, {name}, {place(coordinates)}, {barrier[0]})"
    return f"ptx::tensor_load_im2col({to[0]}, {name}, {place(coordinates)}, {barrier[0]}, {place(offsets)})"


def wgmma(found: re.Match, sums: list[str], a: str | list[str], b: str, accumulate: str, scale_a: str, scale_b: str, *turned: str) -> str:
    n, k, kind = found[1], found[2], found[3]
    assert kind == found[4] and (scale_a, scale_b) == ("1", "1") and k == ("8" if kind == "tf32" else "16")
    registers = isinstance(a, list)
    assert len(turned) == (0 if kind == "tf32" else 1 if registers else 2)
    turned_a, turned_b = ("0", "0", *turned)[-2:] if registers or not turned else turned
    of_a = f"0, {b}, true, {{{', '.join(a)}}}" if registers else f"{a}, {b}, false, {{}}"
    product = f"ptx::Product{{{n}, {k}, ptx::{kind.upper()}, {of_a}, {accumulate}, {turned_a} != 0, {turned_b} != 0}}"
    return f"{{ {references('d', 'float', sums)} ptx::wgmma(d, {len(sums)}, {product}); }}"


def mma(found: re.Match, d: list, a: list, b: list, c: list) -> str:
    assert c == d
    arrays = f"{references('d', 'float', d)} {array('a', 'ptx::u32', a)} {array('b', 'ptx::u32', b)}"
    assert found[1] == ("8" if found[2] == "tf32" else "16")
    return f"{{ {arrays} ptx::mma(d, a, b, ptx::{found[2].upper()}); }}"


def mma_f64(found: re.Match, d: list, a: list, b: list, c: list) -> str:
    arrays = f"{references('d', 'double', d)} {array('a', 'double', a)} {array('b', 'double', b)}"
    begun = "" if c == d else " ".join(f"{to} = {of};" for to, of in zip(d, c, strict=True))
    return f"{{ {begun} {arrays} ptx::mma_f64(d, {found[1]}, {found[2]}, a, b); }}"


def load(found: re.Match, to: str | list[str], at: list[str], *policy: str) -> str:
    kind = C_TYPES[found[1]]
    each = to if isinstance(to, list) else [to]
    return "; ".join(f"{v} = ((const {kind}*){at[0]})[{i}]" for i, v in enumerate(each))


def load_shared(found: re.Match, to: str | list[str], at: list[str]) -> str:
    each = to if isinstance(to, list) else [to]
    return "; ".join(f"{v} = ptx::load_shared<{C_TYPES[found[1]]}>({at[0]}, {i})" for i, v in enumerate(each))


def store(found: re.Match, at: list[str], v: str | list[str]) -> str:
    each = v if isinstance(v, list) else [v]
    word = {1: "ptx::u32", 2: "uint2", 4: "uint4"}[len(each)]
    return f"*({word}*){at[0]} = {word}{{{', '.join(each)}}}"


def move(found: re.Match, to: str | list[str], v: str | list[str]) -> str:
    if isinstance(to, list):
        return f"{to[0]} = (ptx::u16){v}, {to[1]} = (ptx::u16)({v} >> 16)"
    if isinstance(v, list):
        return f"ptx::set_bits({to}, (ptx::u32)(ptx::u16){v[0]} | (ptx::u32)(ptx::u16){v[1]} << 16)"
    return f"ptx::set_bits({to}, {v})"


def converted(found: re.Match, to: str, *v: str) -> str:
    """cvt: one number, or two to a word, the upper one first."""
    if found[1] in ("f16x2", "bf16x2"):
        f = "ptx::to_half" if found[1] == "f16x2" else "ptx::to_bfloat16"
        return f"{to} = (ptx::u32){f}({v[0]}) << 16 | {f}({v[1]})"
    f = {
        "f16": "to_half", "bf16": "to_bfloat16", "tf32": "to_tf32_even" if found[0].startswith("cvt.rn.") else "to_tf32",
        "f32": "from_half" if found[2] == "f16" else "from_bfloat16"
    }[found[1]]
    return f"{to} = ptx::{f}({v[0]})"


CTA = r"(?:\.shared::cta)?"
ORDER = r"(?:\.(?:release|acquire|relaxed)\.(?:cta|cluster))?"
def store_shared(found, at, value):
    kind, values = C_TYPES[found[1]], value if isinstance(value, list) else [value]
    return "; ".join(f"ptx::store_shared<{kind}>({at[0]} + {i} * sizeof({kind}), {v})" for i, v in enumerate(values))


#: What an instruction means: a pattern of its name, and a text with its operands or a function of (match, *operands).
INSTRUCTIONS = {
    rf"mbarrier\.init{CTA}\.b64": "ptx::mbarrier_init({0[0]}, {1})",
    r"fence\.mbarrier_init\.release\.cluster": "ptx::mbarrier_init_fence()",
    rf"mbarrier\.arrive\.expect_tx{ORDER}(?:\.shared::c\w+)?\.b64": "ptx::mbarrier_arrive({1[0]}, 1, {2})",
    rf"mbarrier\.arrive{ORDER}(?:\.shared::c\w+)?\.b64": lambda _, state, at, count="1": f"ptx::mbarrier_arrive({at[0]}, {count}, 0)",
    rf"mbarrier\.try_wait\.parity{ORDER}{CTA}\.b64": "{0} = ptx::mbarrier_try_wait({1[0]}, {2})",
    r"bar\.sync|barrier\.sync(?:\.aligned)?": "ptx::bar_sync({0}, {1})",
    r"bar\.arrive|barrier\.arrive(?:\.aligned)?": "ptx::bar_arrive({0}, {1})",
    r"barrier\.cluster\.arrive(?:\.release|\.relaxed)?(?:\.aligned)?": "ptx::cluster_arrive()",
    r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?": "ptx::cluster_wait()",
    r"mapa\.shared::cluster\.u32": "{0} = ptx::map_rank({1}, {2})",
    r"ld\.shared(?:::c\w+)?(?:\.v\d)?\.(\w+)": load_shared,
    r"st\.shared(?:\.v\d)?\.(\w+)": store_shared,
    r"ld(?:\.acquire\.gpu)?\.global(?:\.nc|\.cg)?(?:\.L2::cache_hint)?(?:\.v\d)?\.(\w+)": load,
    r"st\.global(?:\.v\d)?\.b32": store,
    r"createpolicy\.[\w.:]+": "{0} = 0",
    r"cp\.async\.bulk\.shared::c\w+\.global\.mbarrier::complete_tx::bytes": "ptx::bulk_load({0[0]}, {1[0]}, {2}, {3[0]})",
    r"cp\.async\.bulk\.global\.shared::cta\.bulk_group": "ptx::bulk_store({0[0]}, {1[0]}, {2})",
    r"cp\.async\.bulk\.tensor\.(\d)d\.shared::c\w+\.global\.(tile|im2col)\.mbarrier::complete_tx::bytes": tensor_load,
    r"cp\.async\.bulk\.tensor\.(\d)d\.global\.shared::cta\.tile\.bulk_group": lambda _, to, at: f"ptx::tensor_store({to[0]}, {place(to[1])}, {at[0]})",
    r"cp\.async\.bulk\.commit_group": "ptx::bulk_commit()",
    r"cp\.async\.bulk\.wait_group(\.read)?": lambda found, groups: f"ptx::bulk_wait({groups}, {'true' if found[1] else 'false'})",
    r"fence\.proxy\.async(?:\.\S+)?": "ptx::async_fence()",
    r"cp\.async\.c[ag]\.shared\.global(?:\.L2::128B)?": lambda _, to, at, size, some=None: f"ptx::copy({to[0]}, {at[0]}, {size}, {some or size})",
    r"cp\.async\.commit_group": "ptx::copy_commit()",
    r"cp\.async\.wait_group": "ptx::copy_wait({0})",
    r"prefetch\.tensormap": "ptx::check_map({0[0]})",
    r"prefetch\.global\.L2": "(void)({0[0]})",
    r"griddepcontrol\.wait": "ptx::dependency_wait()",
    r"//": "ptx::reads_earlier()",  # the one remark among instructions: READS_EARLIER in core/launch.cuh
    r"griddepcontrol\.launch_dependents": "(void)0",
    r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32": "(void){0}",
    r"wgmma\.fence\.sync\.aligned": "ptx::wgmma_fence()",
    r"wgmma\.commit_group\.sync\.aligned": "ptx::wgmma_commit()",
    r"wgmma\.wait_group\.sync\.aligned": "ptx::wgmma_wait({0})",
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)": wgmma,
    r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.f32\.(\w+)\.\2\.f32": mma,
    r"mma\.sync\.aligned\.m(\d+)n8k(\d+)\.row\.col\.f64\.f64\.f64\.f64": mma_f64,
    r"ldmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.shared\.b16": lambda found, to, at: (
        f"{{ {references('v', 'ptx::u32', to)} ptx::load_matrices(v, {found[1]}, {at[0]}, {'true' if found[2] else 'false'}); }}"
    ),
    r"stmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.shared\.b16": lambda found, at, v: (
        f"{{ {array('v', 'ptx::u32', v)} ptx::store_matrices({at[0]}, v, {found[1]}, {'true' if found[2] else 'false'}); }}"
    ),
    r"cvt(?:\.rn|\.rna)?\.(f16x2|bf16x2|f16|bf16|tf32|f32)\.(f32|f16|bf16)": converted,
    r"mov\.b(?:16|32|64)": move,
    r"mov\.u64": "{0} = 0x123456789abcdef",  # the number of the launch
    r"min\.NaN\.f32": "{0} = {1} < {2} || {1} != {1} ? {1} : {2}",
    r"min\.NaN\.xorsign\.abs\.f32": "{0} = ptx::least_magnitude({1}, {2})",
    r"setp\.ne\.b32": "{0} = {1} != {2}",
    r"selp\.\w32": "{0} = {3} ? {1} : {2}",
}


def statement(text: str) -> str:
    """One instruction in C++."""
    guard = re.match(r"@(!?\w+)\s+", text)
    if guard:
        return f"if ({guard[1]}) {{ {statement(text[guard.end():])}; }}"
    name, _, rest = text.partition(" ")
    if name == ".reg":
        kind, _, names = rest.partition(" ")
        return {".pred": "bool", ".f16": "ptx::u16", ".b32": "ptx::u32", ".b64": "ptx::u64"}[kind] + " " + names
    for pattern, meaning in INSTRUCTIONS.items():
        found = re.fullmatch(pattern, name)
        if found:
            operands = operands_of(rest) if rest.strip() else []
            return meaning.format(*operands) if isinstance(meaning, str) else meaning(found, *operands)
    raise NotImplementedError(f"ptx.py knows no instruction {name}: {text}")


def call(inside: str) -> str:
    """What an asm statement of these arguments means, as an expression of C++."""
    template, *given = split(inside, ":")
    text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).replace("\\n", " ")
    text = re.sub(r"\s+", " ", text).strip()
    while text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    lines = [re.sub(r"%(\d+)", r"o\1", statement(line.strip())) + ";" for line in text.split(";") if line.strip()]
    if not lines:
        return "((void)0)"
    declared, number = [], 0
    for i, operands in enumerate(given[:2]):
        for operand in split(operands, ",") if operands.strip() else ():
            constraint, expression = re.fullmatch(r'\s*"([=+&]*\w)"\s*\((.*)\)\s*', operand, re.DOTALL).groups()  # type: ignore[union-attr]
            size, kind = CONSTRAINTS[constraint[-1]]
            if i == 0:
                declared.append(f"auto& o{number} = {expression}; static_assert(sizeof o{number} == {size}, \"the constraint's size\");")
            else:
                declared.append(
                    f"const {kind} o{number} = {f'ptx::bits64({expression})' if constraint == 'l' else f'({kind})({expression})'};"
                )
            number += 1
    return f"[&] {{ {' '.join(declared + lines)} }}()"


ASM = re.compile(r"\basm\b\s*(?:volatile\b)?\s*\(")


def translated(text: str) -> str:
    """Preprocessed text with its asm statements in C++."""
    out, done = [], 0
    while found := ASM.search(text, done):
        out.append(text[done : found.start()])
        depth, end = 1, found.end()
        while depth:
            if text[end] in "\"'":
                end = string_end(text, end)
                continue
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        out.append(call(re.sub(r"^#.*$", "", text[found.end() : end - 1], flags=re.MULTILINE)))
        done = end
    return "".join(out) + text[done:]
