// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Fibres: stacks of their own that one thread of the host goes back and forth between.

#include <ucontext.h>
#include <csetjmp>
#include <cstddef>

namespace emulated_device {

class fibre {
 public:
  /// The stack that the thread is on anyway.
  fibre() = default;
  /// A new stack; the first switch to it calls body(), which never returns. Ends the program where there is
  /// no memory.
  explicit fibre(void (*body)());
  fibre(const fibre&) = delete;
  fibre& operator=(const fibre&) = delete;

  /// Leaves this fibre, which is the running one, for another; returns when another fibre switches back.
  void switch_to(fibre& next);

 private:
  [[noreturn]] void enter();
  void arrive();
  static void begin();

  void (*body_)() = nullptr;
  bool started_ = true;
  fibre* previous_ = nullptr;  // who switched to this one
#if defined(__x86_64__)
  void* registers_[5];  // of the compiler's own setjmp, which is faster and which no sanitizer follows
#else
  jmp_buf registers_;
#endif
  ucontext_t first_;
  // For the address sanitizer, which must know whose stack is in use.
  const void* bottom_ = nullptr;
  std::size_t size_ = 0;
  void* fake_frames_ = nullptr;
};

}  // namespace emulated_device
