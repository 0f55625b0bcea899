// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include <pufferfish/compress/codec.hpp>

#include "compress_support.hpp"

/// What every gradient codec must do.
namespace codec_support {

using namespace compress_support;

/// Codes `gradients` with `memory` (empty: none), and returns the bytes.
template <class Codec, class T>
std::vector<std::byte> coded(Codec& codec, context<device::cpu>& ctx, const std::vector<T>& gradients,
                             std::vector<T>& memory, const code_place& place = {}) {
  std::vector<std::byte> code(codec.most_bytes());
  code.resize(codec.encode(ctx, place, gradients, memory, code));
  return code;
}

template <class Codec>
auto decoded(const Codec& codec, context<device::cpu>& ctx, std::span<const std::byte> code, index_t size) {
  std::vector<typename Codec::value_type> values(static_cast<std::size_t>(size), 77);
  codec.decode(ctx, code, decode_as::values, values);
  return values;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// The rules of gradient_codec on tensors of all kinds: the memory is what the code has lost, decoded codes
/// are stored, added and subtracted alike, threads change no bit, codes of another length are refused.
template <class Codec>
void check_codec(const typename Codec::options_type& options) {
  using T = typename Codec::value_type;
  static_assert(gradient_codec<Codec>);
  odd_parameters<T> net;
  const std::vector<coded_tensor> tensors = coded_tensors(net.store);
  const index_t size = coded_size(tensors);
  cpu_context one, three({3, 0});
  Codec codec(tensors, options), threaded(tensors, options);
  CAPTURE(codec.describe());
  std::vector<T> memory(static_cast<std::size_t>(size), T(0)), no_memory;
  for (std::uint64_t step = 0; step < 5; ++step) {
    set_gradients(net.store, 0, step);
    const std::span<const T> view = net.store.gradients();
    std::vector<T> gradients(view.begin(), view.end());
    if (step == 3) std::fill(gradients.begin(), gradients.end(), T(0));
    std::vector<T> wanted = memory, memory_of_threaded = memory;
    for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] += gradients[i];
    const std::vector<T> sum = wanted;  // D
    const code_place place{2, step, 0};
    const auto code = coded(codec, one, gradients, memory, place);
    CHECK(same_bits(code, coded(threaded, three, gradients, memory_of_threaded, place)));
    CHECK(same_bits(memory, memory_of_threaded));
    if (Codec::has_fixed_length) CHECK(code.size() == codec.most_bytes());
    // A memory that holds D codes as gradients that are D.
    CHECK(same_bits(code, coded(codec, one, sum, no_memory, place)));
    codec.decode(one, code, decode_as::subtraction, wanted);
    CHECK(largest_difference<T>(memory, {wanted.begin(), wanted.end()}) == 0.0);
    const std::vector<T> values = decoded(codec, one, code, size);
    CHECK(same_bits(values, decoded(threaded, three, code, size)));
    std::vector<T> added = sum;
    codec.decode(three, code, decode_as::addition, added);
    std::size_t right = 0;
    for (std::size_t i = 0; i < added.size(); ++i) right += added[i] == sum[i] + values[i] ? 1U : 0U;
    CHECK(right == added.size());
    std::vector<std::byte> longer = code;
    longer.push_back({});
    CHECK_THROWS_AS(codec.decode(one, longer, decode_as::values, added), value_error);
  }
  // Gradients of zero decode to zero.
  std::vector<T> zeros(static_cast<std::size_t>(size), T(0));
  CHECK(decoded(codec, one, coded(codec, one, zeros, no_memory), size) == zeros);
  // Nothing to code is no trouble.
  Codec none(std::vector<coded_tensor>{}, options);
  std::vector<T> nothing;
  CHECK(decoded(none, one, coded(none, one, nothing, nothing), 0).empty());
}

/// The parameters that tests of single values use: vectors of these lengths.
template <class T>
std::vector<coded_tensor> vectors_of(const std::vector<index_t>& lengths) {
  std::vector<coded_tensor> result;
  index_t offset = 0;
  for (const index_t length : lengths) {
    const std::string name = "v" + std::to_string(result.size());
    result.push_back({name, logical_layout::vector(length), offset, length, 0, stream_id(name)});
    offset += length;
  }
  return result;
}

/// Tensors of these layouts, one after the other.
inline std::vector<coded_tensor> tensors_of(const std::vector<logical_layout>& layouts) {
  std::vector<coded_tensor> result;
  for (const logical_layout& layout : layouts) {
    std::string name = "t";
    name += std::to_string(result.size());
    result.push_back({name, layout, coded_size(result), layout.size(), 0, stream_id(name)});
  }
  return result;
}

}  // namespace codec_support
