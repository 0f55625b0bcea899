// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: conversion from || no viable conversion

#include <pufferfish/core/view.hpp>

namespace view_drops_const {
float values[4];
const pufferfish::tensor_view<float, 1> writable(values, {4});
const pufferfish::tensor_view<const float, 1> readable = writable;

#ifdef PUFFERFISH_FAIL
const pufferfish::tensor_view<float, 1> sneaky = readable;
#endif
}  // namespace view_drops_const
