#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""count_instructions.py [NVCC]: bench/count_instructions on an invented listing. With NVCC, instead: on the kernels that it
compiles, where there is cuobjdump; prints the table, and whether thin tiles of convolutions reach the goal of at most 90
instructions besides matrix instructions and copies, and tiles of attention without masks that of at most 500."""
import importlib.machinery
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "count_instructions"
GOAL = 90
ATTENTION_GOAL = 500
sys.dont_write_bytecode = True
loader = importlib.machinery.SourceFileLoader("count_instructions", str(SCRIPT))
counts = importlib.util.module_from_spec(importlib.util.spec_from_loader("count_instructions", loader))
sys.modules["count_instructions"] = counts
loader.exec_module(counts)

# A loop from 0x20 to 0x140 with a way around its copies (a small loop of single elements) and a longer and a shorter way to
# its end, after a loop without matrix instructions; then a function without any loop.
LISTING = """
	code for sm_90
		Function : _Z9correlateI13__nv_bfloat16N1_10conv_blockILb1ES3_Li64ELi32ELi8EEELb1EEEvT_
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   IADD3 R1, R1, 0x1, RZ ;   /* 0x0000000101017810 */
                                                             /* 0x000fe40000000000 */
        /*0010*/              @!P1 BRA 0x0 ;
        /*0020*/                   DEPBAR.LE SB0, 0x1 ;
        /*0030*/               @P0 BRA 0x80 ;
        /*0040*/                   LOP3.LUT P1, RZ, R3, R4, RZ, 0xc0, !PT ;
        /*0050*/                   LDGSTS.E.128 [R2], desc[UR4][R6.64], !P1 ;
        /*0060*/                   LDGSTS.E.128 [R2+0xa00], desc[UR4][R8.64], !P1 ;
        /*0070*/                   BRA 0xb0 ;
        /*0080*/                   LDG.E.U16 R9, desc[UR4][R6.64] ;
        /*0090*/                   STS.U16 [R2], R9 ;
        /*00a0*/              @!P2 BRA 0x80 ;
        /*00b0*/                   LDGDEPBAR ;
        /*00c0*/                   LDSM.16.M88.4 R20, [R10] ;
        /*00d0*/                   HMMA.16816.F32.BF16 R48, R20.reuse, R24, R48 ;
        /*00e0*/                   HMMA.16816.F32.BF16 R52, R20, R26, R52 ;
        /*00f0*/               @P3 BRA 0x120 ;
        /*0100*/                   STL [R1], R7 ;
        /*0110*/                   IMAD.MOV.U32 R7, RZ, RZ, RZ ;
        /*0120*/                   VIADD R4, R4, 0x1 ;
        /*0130*/                   ISETP.GE.AND P1, PT, R4, R5, PT ;
        /*0140*/              @!P1 BRA 0x20 ;
        /*0150*/                   EXIT ;
		Function : _Z5emptyv
        /*0000*/                   EXIT ;
"""


class Listing(unittest.TestCase):
    def test_loops_and_paths(self):
        (name, body), (other, empty) = counts.functions(LISTING.splitlines())
        self.assertEqual((len(body), other, len(empty)), (22, "_Z5emptyv", 1))
        self.assertEqual(counts.main_loops(body), [(2, 20)])
        around = body[:-1] + [counts.Instruction(0x150, "P1", "BRA", "0x10")]
        self.assertEqual(counts.main_loops(around), [(2, 20)])
        self.assertEqual(counts.main_loops(around, outer=True), [(1, 21)])
        self.assertEqual(counts.main_loops(empty), [])
        self.assertEqual(counts.title(name), "correlate, gradient 64x32 bf16")
        row = counts.count(body, 2, 20)
        # Without the way around the copies; `least` without the way that spills.
        self.assertEqual(row, {"instructions": 16, "matrix": 2, "loads": 1, "copies": 2, "other": 11, "least": 9, "spills": 1,
                               "steps": 1})

    def test_as_a_program(self):
        with tempfile.TemporaryDirectory() as folder:
            file, kept = pathlib.Path(folder) / "a.sass", pathlib.Path(folder) / "a.json"
            file.write_text(LISTING, encoding="utf-8")
            done = subprocess.run([sys.executable, str(SCRIPT), str(file), "--json", str(kept)], text=True, check=False,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertEqual([row["other"] for row in json.loads(kept.read_text(encoding="utf-8"))], [11])
            self.assertIn("correlate, gradient 64x32 bf16", done.stdout)
            # No such program: skipped.
            done = subprocess.run([sys.executable, str(SCRIPT), str(folder) + "/a.o"], text=True, check=False, env={"PATH": ""},
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode != 77:
                self.assertTrue(pathlib.Path("/usr/local/cuda/bin/cuobjdump").is_file())


def compiled(nvcc):
    tool = counts.found_tool(None)
    if tool is None:
        print("no cuobjdump")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder) / "conv.cubin"
        subprocess.run([nvcc, "-std=c++20", "-O3", "--extended-lambda", "--expt-relaxed-constexpr", "-arch=sm_90a",
                        f"-I{ROOT / 'include'}", "-cubin", str(ROOT / "bench" / "count_instructions.cu"), "-o", str(cubin)], check=True)
        lines = list(counts.disassembled(cubin, tool, None))
    rows = counts.rows_of(lines, "correlate|halo_weight")
    tiles = counts.rows_of(lines, "attention", outer=True)
    print(counts.table(rows + tiles))
    groups = [row for row in rows if "halo" in row["function"]]
    first = [row for row in rows if row["loop"] == 1 and row not in groups]
    over = [row["kernel"] for row in first if row["least"] > GOAL]
    print(f"{len(first) - len(over)} of {len(first)} loops over patches have at most {GOAL} other instructions a step"
          + "".join(f"\nmore: {name}" for name in over))
    slow = [f"{row['kernel']}: {row['least']:.0f}" for row in tiles if row["least"] > ATTENTION_GOAL]
    print(f"{len(tiles) - len(slow)} of {len(tiles)} loops over tiles of attention have at most {ATTENTION_GOAL}")
    unittest.TestCase().assertEqual((len(first), len(groups), len(tiles), slow), (11, 10, 3, []))
    unittest.TestCase().assertTrue(all(row["matrix"] and row["copies"] and not row["spills"] for row in first + groups + tiles))
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(compiled(sys.argv[1]))
    unittest.main()
