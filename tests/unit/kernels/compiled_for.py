"""Compile Triton kernels for GPUs that are not here, and read what the compiler says about them.

    python tests/unit/kernels/compiled_for.py [capability …]        prints JSON, one object per kernel and GPU

A process of its own, because the tests around it run the same modules in Triton's interpreter. Registers and spills
come from `cuobjdump --dump-resource-usage` on the cubin; narrow loads and barriers show in the PTX where they do in
the SASS (whether, not how many: compared for all 200), which takes as long to print as a kernel to compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[3] / "src"))

LOSS_KERNEL = "cross_entropy_rows_kernel"
MULTIPLES = ("n_columns", "n_blocks", "n_padded", "n_elements")  # of 16
FP8_KERNEL, FIRST_WITH_FP8 = "quantise_kernel", 89
TILE_KERNEL, FIRST_WITH_TILES = "weight_gradient_kernel", 90
CUOBJDUMP = "backends/nvidia/bin/cuobjdump"


def compile_kernel(kernel, arguments: dict, capability: int, warps: int):
    """`arguments` maps a name to a Triton type ("*bf16", "i32", "fp32"), or to `("constexpr", value)`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind = arguments[name]
        if isinstance(kind, tuple):
            signature[name], constants[name] = "constexpr", kind[1]
        else:
            signature[name] = kind
            # torch's allocations are aligned, and sizes mostly multiples of 16: Triton specialises on both.
            if kind.startswith("*") or name.endswith("_stride") or name in MULTIPLES:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps} | {name: arguments[name] for name in ("num_stages",) if name in arguments}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(compiled) -> dict:
    """Registers, stack and local memory (spills), shared memory, and the widest global access."""
    import triton

    cuobjdump = Path(triton.__file__).parent / CUOBJDUMP
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [cuobjdump, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    used, ptx = (
        {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)},
        compiled.asm["ptx"],
    )
    return {
        "registers": used["REG"],
        "spilled_bytes": used["STACK"] + used["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
        "wide_loads": len(re.findall(r"\bld\.global[.\w]*\.v4\.[bf]32", ptx)),
        "narrow_loads": len(re.findall(r"\bld\.global[.\w]*\.[bsu](?:8|16)\b", ptx)),
        "barriers": len(re.findall(r"\bbar\.sync", ptx)),
        "products": len(re.findall(r"\bwgmma\.mma_async", ptx)),
        "conversions": compiled.asm["ttgir"].count("ttg.convert_layout"),
    }


def types(kind: str, names: str) -> dict:
    return dict.fromkeys(names.split(), kind)


def constant(**values) -> dict:
    return {name: ("constexpr", value) for name, value in values.items()}


def add_norm_cases():
    from automodel.kernels.add_norm import backward_launch, backward_stages, forward_launch
    from automodel.kernels.add_norm_triton import add_norm_backward_kernel, add_norm_forward_kernel

    kinds = types("i32", "n_rows n_tiles site threshold") | types("fp32", "scale eps") | types("*i64", "SEED")
    kinds |= types("*bf16", "X RESIDUAL Y SUM DY DX DRESIDUAL WEIGHT NORM_BIAS") | types("*fp32", "MEAN RSTD PARTIAL")
    for width in (256, 768, 1024, 2048, 8192):
        slots = constant(NORM_BIAS_SLOT=1, LINEAR_BIAS_SLOT=0, SLOTS=2)
        launches = ((add_norm_forward_kernel, forward_launch), (add_norm_backward_kernel, backward_launch))
        for kernel, launch in launches:
            shape = launch(width)
            sizes = constant(D=width, BLOCK_D=shape.block, ROWS=shape.rows, LINEAR_BIAS=None, DSUM=None)
            sizes |= constant(X_ROWS=None, RESIDUAL_ROWS=None, DROP_LAST=False, STAGES=backward_stages(shape, 2))
            yield f"{kernel.__name__} D={width}", kernel, kinds | sizes | slots, shape.warps


def gelu_cases():
    from automodel.kernels import bias_gelu_triton as kernels
    from automodel.kernels.bias_gelu import launch_shape

    kinds = types("*bf16", "X BIAS Y DY DX") | types("*fp32", "PARTIAL") | types("i32", "n_rows")
    pairs = (
        (kernels.bias_gelu_forward_kernel, 3072),
        (kernels.bias_gelu_backward_kernel, 3072),
        (kernels.geglu_forward_kernel, 1152),
        (kernels.geglu_backward_kernel, 1152),
    )
    for kernel, width in pairs:
        shape = launch_shape(width)
        for tanh in (False, True):
            sizes = constant(WIDTH=width, BLOCK=shape.block, ROWS=shape.rows, TANH=tanh)
            yield f"{kernel.__name__} F={width} tanh={tanh}", kernel, kinds | sizes, shape.warps


def adamw_cases():
    import triton.language as tl

    from automodel.kernels import adamw, adamw_triton
    from automodel.kernels.flat_parameters import BLOCK
    from automodel.kernels.lazy_rows import RING

    kinds = types("*fp32", "WEIGHT EXP_AVG EXP_AVG_SQ PARTIAL TABLE NORM") | types("*bf16", "COPY")
    kinds |= types("*i64", "GRADIENTS STEP SKIPPED") | types("*i32", "BLOCKS CHOSEN")
    kinds |= types("*fp64", "HYPER POWERS LR_FACTORS")
    kinds |= types("i32", "n_blocks n_chosen n_partials n_groups n_factors") | types("fp32", "max_norm")
    sizes = constant(BLOCK=BLOCK, PER_PROGRAM=adamw.NORM_BLOCKS_PER_PROGRAM)
    for name, narrow, wide in (("fp32", None, True), ("bf16", tl.bfloat16, False), ("mixed", tl.bfloat16, True)):
        flags = constant(NARROW=narrow, WIDE=wide, ZERO=True)
        yield f"square_sums_kernel {name}", adamw_triton.square_sums_kernel, kinds | sizes | flags, adamw.NORM_WARPS
        yield f"update_kernel {name}", adamw_triton.update_kernel, kinds | sizes | flags, adamw.UPDATE_WARPS
    yield from run_cases(kinds)
    yield from adamw8_cases(kinds | sizes)
    prepare = kinds | types("*fp32", "ROW_PARTIAL HISTORY") | types("i32", "n_row_partials")
    prepare |= constant(LOSS_SCALE=None, GROUPS=2, BLOCK=1024, SKIP=True, LAZY_GROUP=0, RING=RING)
    yield "prepare_kernel", adamw_triton.prepare_kernel, prepare, 8


def run_cases(kinds: dict):
    """Long pieces: of masters with bf16 gradients, of bf16 weights, and gradients summed up in fp32."""
    from automodel.kernels import adamw, adamw_triton, square_sums
    from automodel.kernels.flat_parameters import BLOCK

    size = constant(BLOCK=BLOCK)
    squares, warps = dict(square_sums.RUN), square_sums.RUN["num_warps"]
    squares.pop("num_warps")
    for dtype in ("*bf16", "*fp32"):
        own = kinds | size | constant(**squares) | types(dtype, "GRADIENT")
        yield f"square_run_kernel {dtype}", adamw_triton.square_run_kernel, own, warps
    pure = types("*bf16", "WEIGHT EXP_AVG EXP_AVG_SQ") | constant(COPY=None)
    for name, more, width in (("masters", {}, 4), ("pure", pure, 2)):
        for where, warps in (("alone", adamw.UPDATE_WARPS), ("beside", adamw.BESIDE_WARPS)):
            walk = 32 * warps * adamw.UPDATE_BYTES // width
            own = kinds | size | types("*bf16", "GRADIENT") | constant(WALK=walk) | more
            yield f"update_run_kernel {name}, {where}", adamw_triton.update_run_kernel, own, warps


def weight_gradient_cases():
    from automodel.kernels import weight_gradient as sizes
    from automodel.kernels.weight_gradient_triton import weight_gradient_kernel

    tile_o, tile_i, step = sizes.TILE_O, sizes.TILE_I, sizes.STEP
    for dtype in ("bf16", "fp16"):
        kinds = types("*fp32", "PARTIAL") | types("i32", "n_steps tiles_o tiles_i") | {"num_stages": sizes.STAGES}
        tiles = {"DY": (step, tile_o), "X": (step, tile_i), "OUT": (tile_o, tile_i // 2)}
        kinds |= {name: f"tensordesc<{dtype}[{rows},{columns}]>" for name, (rows, columns) in tiles.items()}
        kinds |= constant(TILE_O=tile_o, TILE_I=tile_i, STEP=step)
        yield f"{TILE_KERNEL} {dtype}", weight_gradient_kernel, kinds, sizes.WARPS


def adamw8_cases(kinds: dict):
    """Codes of masters and of bf16 weights, with gradients in bf16 and, beside fp32 sums, zeroed; and fp32 moments."""
    import triton.language as tl

    from automodel.kernels import adamw8
    from automodel.kernels.adamw8_triton import update8_kernel

    codes = kinds | types("*u8", "EXP_AVG EXP_AVG_SQ") | types("*fp32", "SCALE SCALE_SQ") | types("*i32", "MINE")
    fixed = constant(STRIP=adamw8.STRIP, EIGHT=True, NARROW=tl.bfloat16, WIDE=False, ZERO=False)
    pure = types("*bf16", "WEIGHT") | constant(COPY=None)
    wide = types("*fp32", "EXP_AVG EXP_AVG_SQ") | constant(SCALE=None, SCALE_SQ=None, EIGHT=False)
    yield "update8_kernel masters", update8_kernel, codes | fixed, adamw8.WARPS
    yield "update8_kernel pure", update8_kernel, codes | fixed | pure, adamw8.WARPS
    sums = constant(NARROW=None, WIDE=True, ZERO=True)
    yield "update8_kernel sums", update8_kernel, codes | fixed | sums, adamw8.WARPS
    yield "update8_kernel 32 bits", update8_kernel, codes | fixed | pure | wide, adamw8.WARPS


def lazy_rows_cases():
    from automodel.kernels import lazy_rows_triton as kernels
    from automodel.kernels.lazy_rows import NORM_ROWS, RING

    kinds = types("*fp32", "WEIGHT EXP_AVG EXP_AVG_SQ TABLE HISTORY PARTIAL") | types("*bf16", "COPY ROWS_TN")
    kinds |= types("*i64", "LAST STEP IDS") | types("*i32", "RUNS") | types("i32", "n_rows n_tokens padding")
    sizes = constant(N=768, BLOCK_N=1024, RING=RING, ROWS=NORM_ROWS)
    for kernel, warps in (
        (kernels.idle_steps_kernel, 4),
        (kernels.row_squares_kernel, 8),
        (kernels.update_rows_kernel, 4),
    ):
        yield kernel.__name__, kernel, kinds | sizes, warps


def attention_cases():
    from automodel.kernels import attention
    from automodel.kernels import attention_triton as kernels
    from automodel.kernels import pooled_attention_triton as pooled
    from automodel.kernels.pooled_attention import KEYS, WARPS

    kinds = types("*bf16", "QKV OUT DOUT DQKV Q KV DQ DKV") | types("*fp32", "LSE DELTA") | types("*i32", "WORDS CU")
    kinds |= types("*i64", "SEED POSITIONS") | types("fp32", "scale kept_scale")
    kinds |= types("i32", "n_tokens n_positions n_queries site threshold") | constant(TABLE=None)
    kinds |= types("i32", "n_documents n_key_tiles n_query_tiles") | types("*i32", "TILES")
    for dim in (32, 64):
        sizes = constant(H=12, K=12, D=dim, BLOCK_D=dim, CAUSAL=False, WINDOW=-1, CAP=0.0, BLOCK=KEYS)
        sizes |= constant(ROWS=attention.DELTA_ROWS)
        pairs = (
            (kernels.attention_forward_kernel, attention.FORWARD[dim]),
            (kernels.attention_backward_kernel, attention.BACKWARD[dim]),
        )
        for kernel, tiles in pairs:
            blocks = constant(BLOCK_M=tiles.queries, BLOCK_N=tiles.keys, MEMBERS=1) | {"num_stages": tiles.stages}
            yield f"{kernel.__name__} D={dim}", kernel, kinds | sizes | blocks, tiles.warps
        turned = kinds | sizes | blocks | types("*fp32", "TABLE")
        yield f"attention_backward_kernel, turned, D={dim}", kernels.attention_backward_kernel, turned, tiles.warps
        yield f"attention_delta_kernel D={dim}", kernels.attention_delta_kernel, kinds | sizes | blocks, 4
        for kernel in (pooled.pooled_forward_kernel, pooled.pooled_backward_kernel):
            yield f"{kernel.__name__} D={dim}", kernel, kinds | sizes, WARPS
    sizes = constant(H=8, K=4, D=256, BLOCK_D=256, CAUSAL=True, WINDOW=4095, CAP=50.0, SEED=None, WORDS=None)  # Gemma 2
    pairs = (
        (kernels.attention_forward_kernel, attention.FORWARD[256]),
        (kernels.attention_backward_kernel, attention.BACKWARD[256]),
    )
    for kernel, tiles in pairs:
        blocks = constant(BLOCK_M=tiles.queries, BLOCK_N=tiles.keys, MEMBERS=1) | {"num_stages": tiles.stages}
        yield f"{kernel.__name__}, capped", kernel, kinds | sizes | blocks, tiles.warps
    for dim, keys in ((64, 8), (128, 8), (128, 32)):
        how = attention.Attention(32, keys, dim, 0.1, causal=True)
        sizes = constant(H=32, K=keys, D=dim, BLOCK_D=dim, CAUSAL=True, WINDOW=-1, CAP=0.0, SEED=None, WORDS=None)
        backward = kernels.attention_backward_kernel
        grouped = (
            ("", kernels.attention_forward_kernel, attention.FORWARD, attention.GROUPED_FORWARD),
            ("on Hopper, ", kernels.attention_forward_kernel, attention.FORWARD, attention.HOPPERS_GROUPED_FORWARD),
            ("", backward, attention.BACKWARD, attention.GROUPED_BACKWARD),
            ("on Hopper, ", backward, attention.HOPPERS_BACKWARD, attention.HOPPERS_GROUPED_BACKWARD),
        )
        for where, kernel, alone, several in grouped:
            tiles, members, queries = how.launch(alone, several)
            blocks = constant(BLOCK_M=queries, BLOCK_N=tiles.keys, MEMBERS=members) | {"num_stages": tiles.stages}
            own = kinds | sizes | blocks | types("*fp32", "TABLE")
            yield f"{kernel.__name__}, {where}{32 // keys} heads, D={dim}", kernel, own, tiles.warps


def column_sum_cases():
    from automodel.kernels.column_sum import BLOCK_COLUMNS, BLOCK_ROWS
    from automodel.kernels.column_sum_triton import column_sum_kernel

    kinds = types("*fp32", "PARTIAL") | types("*bf16", "OUT") | types("i32", "n_rows n_columns")
    sizes = constant(BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS)
    yield "column_sum_kernel", column_sum_kernel, kinds | sizes, 4


def decoder_cases():
    from automodel.kernels import rms_norm, rms_norm_triton, swiglu, swiglu_triton

    kinds = types("*bf16", "X RESIDUAL WEIGHT Y SUM DY DSUM DX") | types("*fp32", "RSTD PARTIAL") | types("fp32", "eps")
    kinds |= types("i32", "n_rows x_stride sum_stride")
    for width in (896, 1024, 2048, 2560, 4096, 8192):
        shape = rms_norm.launch_shape(width)
        sizes = constant(D=width, BLOCK_D=shape.block, OFFSET=0.0, ROUND_FIRST=True)
        sizes |= constant(STAGES=rms_norm.backward_stages(shape, 2))
        for kernel in (rms_norm_triton.rms_norm_forward_kernel, rms_norm_triton.rms_norm_backward_kernel):
            yield f"{kernel.__name__} D={width}", kernel, kinds | sizes, shape.warps
    for activation in swiglu.ACTIVATIONS:
        shape = swiglu.launch_shape(3072)
        sizes = constant(WIDTH=3072, BLOCK=shape.block, ROWS=shape.rows, ACTIVATION=activation, AGAIN=True)
        for kernel in (swiglu_triton.swiglu_forward_kernel, swiglu_triton.swiglu_backward_kernel):
            yield f"{kernel.__name__} F=3072 {activation}", kernel, kinds | sizes, shape.warps


def room_cases():
    from automodel.kernels import with_room
    from automodel.kernels.with_room_triton import with_room_kernel

    kinds = types("*bf16", "X WIDE") | types("i32", "n_rows x_stride")
    sizes = constant(D=4096, ZEROS_FROM=4128, WIDTH=4160, ROWS=with_room.ROWS, BLOCK=with_room.BLOCK)
    yield "with_room_kernel", with_room_kernel, kinds | sizes, with_room.WARPS


def heads_cases():
    """Shapes of Llama-1B, of Qwen3-0.6B and 8B with norms, and of Phi-4-mini, which turns three quarters of a head."""
    from automodel.kernels.dispatch import power_of_two_above
    from automodel.kernels.rope import warps_for
    from automodel.kernels.rope_heads_triton import heads_backward_kernel, heads_forward_kernel
    from automodel.kernels.rope_triton import rope_kernel

    kinds = types("*bf16", "X OUT DQ DK DV DX QUERY_WEIGHT KEY_WEIGHT") | types("*fp32", "TABLE PARTIAL")
    kinds |= types("*i64", "POSITIONS") | types("fp32", "eps sign") | types("i32", "n_tokens n_positions row_stride")
    kinds |= types("i32", "x_stride dq_stride dk_stride dv_stride")
    for name, queries, keys, dim, angles, normed in (
        ("llama-1b", 32, 8, 64, 32, False),
        ("qwen3-0.6b", 16, 8, 128, 64, True),
        ("qwen3-8b", 32, 8, 128, 64, True),
        ("gemma3-1b", 4, 1, 256, 128, True),
        ("phi4-mini", 24, 8, 128, 48, False),
    ):
        slots, block = power_of_two_above(queries + keys), power_of_two_above(angles)
        sizes = constant(
            QUERIES=queries, KEYS=keys, TURNING=queries + keys, HEAD=dim, HALF=angles, BLOCK=block, SLOTS=slots,
            OFFSET=0.0, WITH_VALUES=True, VALUE_SLOTS=power_of_two_above(keys), WHOLE=power_of_two_above(dim),
        )  # fmt: skip
        if not normed:
            sizes |= constant(X=None, QUERY_WEIGHT=None, KEY_WEIGHT=None, PARTIAL=None)
        warps = warps_for(slots * block)
        yield f"heads_backward_kernel {name}", heads_backward_kernel, kinds | sizes, warps
        first = heads_forward_kernel if normed else rope_kernel
        yield f"{first.__name__} {name}", first, kinds | sizes | types("*bf16", "X"), warps


def loss_cases():
    """Llama 3 in training and in evaluation, GPT-2's odd vocabulary, Gemma 2's capped logits, and fp32."""
    from automodel.kernels.linear_cross_entropy import IGNORE, launch_shape
    from automodel.kernels.linear_cross_entropy_triton import cross_entropy_rows_kernel
    from automodel.kernels.logits_memory import padded_width

    kinds = types("*i64", "LABELS") | types("*fp32", "SCALE LOSS") | types("*i32", "RIGHT") | types("i32", "first")
    kinds |= types("*fp32", "ENTROPY")
    for name, words, dtype, cap, learns in (
        ("llama-3", 128_256, "*bf16", 0.0, True),
        ("llama-3 evaluated", 128_256, "*bf16", 0.0, False),
        ("gpt-2", 50_257, "*bf16", 0.0, True),
        ("gemma-2", 256_000, "*bf16", 30.0, True),
        ("llama-3 fp32", 128_256, "*fp32", 0.0, True),
        ("llama-3 with its entropy", 128_256, "*bf16", 0.0, True),
    ):
        lanes, vec, warps = launch_shape(words)
        sizes = constant(
            V=words, STRIDE=padded_width(words), LANES=lanes, VEC=vec, IGNORE=IGNORE, LOGIT_SCALE=1.0, SOFTCAP=cap,
            Z_LOSS=0.0, SMOOTHING=0.0, LEARNS=learns,
        )  # fmt: skip
        if "entropy" not in name:
            sizes |= constant(ENTROPY=None) | (constant(RIGHT=None) if learns else {})
        yield f"{LOSS_KERNEL} {name}", cross_entropy_rows_kernel, kinds | types(dtype, "LOGITS") | sizes, warps


def fp8_cases():
    from automodel.kernels import fp8
    from automodel.kernels.fp8_triton import amax_kernel, quantise_kernel

    kinds = types("*bf16", "X") | types("*fp32", "PARTIAL SCALE") | types("i32", "n_elements n_rows n_partials")
    kinds |= types("i32", "n_columns n_padded") | constant(BLOCK=fp8.AMAX_BLOCK)
    tile = constant(BLOCK_R=fp8.TILE_ROWS, BLOCK_C=fp8.TILE_COLUMNS, PARTIALS=1024, TINIEST=fp8.TINIEST)
    yield "amax_kernel", amax_kernel, kinds, fp8.AMAX_WARPS
    for name, element, dtype in (("e4m3", "*fp8e4nv", fp8.E4M3), ("e5m2", "*fp8e5", fp8.E5M2)):
        made = types(element, "ROWS COLUMNS") | constant(LARGEST=fp8.LARGEST[dtype])
        yield f"quantise_kernel {name}", quantise_kernel, kinds | made | tile, fp8.TILE_WARPS
        known = constant(PARTIAL=None, ROWS=None, PARTIALS=1)
        yield f"quantise_kernel {name} turned", quantise_kernel, kinds | made | tile | known, fp8.TILE_WARPS


def packed_cases():
    from automodel.kernels import packed
    from automodel.kernels.packed_triton import expand_kernel, expand_rows_kernel

    kinds = types("*u8", "CODES") | types("*fp32", "WIDE MEAN BOOK DYNAMIC") | types("*bf16", "OUT") | types("i32", "n")
    sizes = constant(HALF=packed.GROUP // 2, STRIP=packed.STRIP, GROUPS=packed.GROUPS, EVEN=True)
    twice = kinds | types("*u8", "SCALES") | sizes | constant(DOUBLE=True)
    once = kinds | types("*fp32", "SCALES") | sizes | constant(DOUBLE=False, WIDE=None, MEAN=None, DYNAMIC=None)
    yield "expand_kernel double", expand_kernel, twice, packed.WARPS
    yield "expand_kernel", expand_kernel, once, packed.WARPS
    rows = types("*i8", "CODES") | types("*fp32", "SCALES") | types("*bf16", "OUT")
    yield "expand_rows_kernel", expand_rows_kernel, rows | constant(WIDTH=4096, BLOCK=packed.COLUMNS), packed.WARPS


def every_case():
    yield from loss_cases()
    yield from decoder_cases()
    yield from heads_cases()
    yield from room_cases()
    yield from add_norm_cases()
    yield from gelu_cases()
    yield from column_sum_cases()
    yield from adamw_cases()
    yield from weight_gradient_cases()
    yield from lazy_rows_cases()
    yield from attention_cases()
    yield from fp8_cases()
    yield from packed_cases()


def main() -> None:
    capabilities = [int(a) for a in sys.argv[1:]] or [90, 80]
    report = []
    for name, kernel, arguments, warps in every_case():
        for capability in capabilities:
            if name.startswith(FP8_KERNEL) and capability < FIRST_WITH_FP8:
                continue
            if name.startswith(TILE_KERNEL) and capability < FIRST_WITH_TILES:
                continue
            compiled = compile_kernel(kernel, arguments, capability, warps)
            report.append({"kernel": name, "capability": capability, "warps": warps, **resources(compiled)})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
