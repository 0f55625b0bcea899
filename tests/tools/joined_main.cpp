// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The main of a program whose own main is in the namespace PROGRAM, because its source was compiled with
// others (group.py).
namespace PROGRAM {
int main(int argc, char** argv);
}

int main(int argc, char** argv) { return PROGRAM::main(argc, argv); }
