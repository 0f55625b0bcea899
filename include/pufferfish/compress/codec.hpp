// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gradient_codec`: turns gradients into a short code and back. Codes are sent between ranks by
/// gathered_codes (compress/codes/gathered_codes.hpp) and two_hop_codes (compress/codes/two_hop_codes.hpp).

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/distributed/compressor.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/nn/parameter_store.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A parameter, or the part of a parameter in one stripe (a range of the gradient array that one rank owns,
/// see two_hop_codes), as input of a codec. In a list of them offsets ascend from 0 without gaps: the values
/// of tensor t + 1 are stored directly after those of tensor t.
struct coded_tensor {
  std::string name;          ///< name of the parameter
  logical_layout layout;     ///< layout of the whole parameter
  index_t offset = 0;        ///< position of the first element in the values that the codec codes
  index_t size = 0;          ///< number of elements; at least 1
  index_t first = 0;         ///< position of the first element in the parameter's storage
  std::uint64_t stream = 0;  ///< stream of random numbers; depends on the name alone
};

/// Identifies a code for random codecs, so that a resumed run draws the same random numbers: the rank that
/// encodes, the step, and the hop (the first or second time that a code is sent in a step, see
/// two_hop_codes). The draws of different places are independent.
struct code_place {
  int rank = 0;            ///< rank that encodes
  std::uint64_t step = 0;  ///< number of exchanges before this one
  int hop = 0;             ///< 0: code of a rank's own gradients, 1: code of a stripe's mean by its owner
};

/// Whether decoded values replace the values of a span, are added to them or subtracted from them.
enum class decode_as { values, addition, subtraction };

/// A gradient_codec turns the values of a list of tensors, which its constructor gets, into a code (bytes)
/// and back. In the members, D = gradients + memory, and C(D) are the values that the code of D decodes to:
///   value_type                         float or double
///   has_fixed_length                   static constexpr bool: every code has most_bytes() bytes
///   most_bytes()                       largest number of bytes of a code
///   encode(ctx, place, gradients, memory, code)  writes the code of D into `code` (most_bytes() bytes) and
///                                      returns its length. On return memory is D - C(D). An empty memory
///                                      counts as zero and stays empty
///   decode(ctx, code, as, to)          to = C(D), to += C(D) or to -= C(D). Throws value_error for
///                                      bytes that are not a code
///   describe()                         returns a line that identifies the codec's options
/// Spans of values have the length of all tensors together and do not overlap. Results do not depend on the
/// number of threads. If D is not finite, C(D) is not specified.
///
/// gathered_codes and two_hop_codes also require `options_type` and a constructor from (std::vector of
/// coded_tensor, options_type). Optional members:
///   has_parts(options)   static; false if parts of the arena cannot be coded by codecs of their own
///   expected_bytes()     expected length of a code, for codecs without a fixed length
///   has_entries, for_each_entry(code, f)   for codes that are lists of entries: see summed_entries
///
/// `memory` is the error feedback of one rank. encode uses workspaces of the codec, so calls on one codec
/// must not overlap. decode does not change the codec. All members are local; only classes that send codes
/// are used across ranks.
///
/// \code
/// sign_codec<float> codec(coded_tensors(store));
/// std::vector<float> memory(store.gradients().size(), 0.0F);
/// std::vector<std::byte> code(codec.most_bytes());
/// code.resize(codec.encode(ctx, {.rank = 0, .step = 0}, store.gradients(), memory, code));
/// codec.decode(ctx, code, decode_as::values, store.gradients());  // the gradients are now C
/// \endcode
template <class C>
concept gradient_codec = std::movable<C> &&
    requires(C& codec, const C& observer, context<device::cpu>& ctx, const code_place& place,
             std::span<const typename C::value_type> gradients, std::span<typename C::value_type> memory,
             std::span<std::byte> code, std::span<const std::byte> coded) {
  { C::has_fixed_length } -> std::convertible_to<bool>;
  { observer.most_bytes() } -> std::same_as<std::size_t>;
  { codec.encode(ctx, place, gradients, memory, code) } -> std::same_as<std::size_t>;
  observer.decode(ctx, coded, decode_as::values, memory);
  { observer.describe() } -> std::same_as<std::string>;
};

/// Lists all parameters of a store that have elements, in the order of the store's gradient array (the arena,
/// store.gradients()). Offsets are positions in that array, and `stream` is stream_id(name). The result
/// copies names and layouts; the store need not outlive it.
template <class T>
std::vector<coded_tensor> coded_tensors(const parameter_store<T>& store) {
  std::vector<coded_tensor> result;
  for (const auto& entry : store.parameters()) {
    if (entry.thing->size() == 0) continue;
    result.push_back(
        {entry.name, entry.thing->layout(), entry.offset, entry.thing->size(), 0, stream_id(entry.name)});
  }
  return result;
}

/// The parts of tensors in [begin, end) of the coded values, in their order. Tensors outside of this range
/// are left out. Offsets of the result count from `begin`. A part keeps the name, the layout and the random
/// stream of its tensor; `first` is the part's position in the parameter's storage, so that random draws do
/// not depend on the cuts.
inline std::vector<coded_tensor> coded_parts(const std::vector<coded_tensor>& tensors, index_t begin,
                                             index_t end) {
  std::vector<coded_tensor> result;
  for (const coded_tensor& tensor : tensors) {
    const index_t first = std::max(begin, tensor.offset), last = std::min(end, tensor.offset + tensor.size);
    if (first >= last) continue;
    coded_tensor& part = result.emplace_back(tensor);
    part.first += first - tensor.offset;
    part.offset = first - begin;
    part.size = last - first;
  }
  return result;
}

/// Number of elements of all tensors together. This is the end of the last tensor, because offsets ascend
/// without gaps.
inline index_t coded_size(const std::vector<coded_tensor>& tensors) {
  return tensors.empty() ? 0 : tensors.back().offset + tensors.back().size;
}

namespace detail {

/// Whether parts of the arena can be coded by codecs of their own: Codec::has_parts(options), or true if the
/// codec has no such member.
template <class Codec>
bool codes_have_parts([[maybe_unused]] const typename Codec::options_type& options) {
  if constexpr (requires { Codec::has_parts(options); }) {
    return Codec::has_parts(options);
  } else {
    return true;
  }
}

/// Random stream of a codec for one tensor. The stream depends on the seed, the name of the method
/// (`system`), step, rank, hop and the tensor's name.
inline random_stream code_randoms(std::uint64_t seed, std::string_view system, const code_place& place,
                                  const coded_tensor& tensor) {
  const auto rank = 2 * static_cast<std::uint64_t>(place.rank) + static_cast<std::uint64_t>(place.hop);
  return {seed, substream(substream(substream(stream_id(system), place.step), rank), tensor.stream)};
}

/// memory += gradients. Both have memory.size() elements and do not overlap.
template <class T>
void add_gradients(context<device::cpu>& ctx, std::span<const T> gradients, std::span<T> memory) {
  const auto add = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, add<T>);
  const T* from = gradients.data();
  T* to = memory.data();
  ops::for_chunks(ctx, static_cast<index_t>(memory.size()),
                  [=](index_t begin, index_t end) { add(from + begin, to + begin, end - begin); });
}

/// Returns the values to code. If `memory` is empty, these are the gradients: the result is gradients.data().
/// Else memory += gradients, and the result is memory.data().
template <class T>
const T* values_to_code(context<device::cpu>& ctx, std::span<const T> gradients, std::span<T> memory) {
  if (memory.empty()) return gradients.data();
  add_gradients(ctx, gradients, memory);
  return memory.data();
}

/// Stores, adds or subtracts one decoded value: to = value, to += value or to -= value.
template <class T>
PUFFERFISH_ALWAYS_INLINE void put_decoded(decode_as as, T value, T& to) {
  to = as == decode_as::values ? value : as == decode_as::addition ? to + value : to - value;
}

/// Writes a trivially copyable value at a byte position of a code. Codes have no alignment.
template <class T>
void write_at(std::span<std::byte> code, std::size_t byte, const T& value) {
  std::memcpy(code.data() + byte, &value, sizeof(T));
}
/// Reads a trivially copyable value from a byte position of a code.
template <class T>
T read_at(std::span<const std::byte> code, std::size_t byte) {
  T value;
  std::memcpy(&value, code.data() + byte, sizeof(T));
  return value;
}

/// Throws value_error, naming the codec, unless a code of `found` bytes has `wanted` bytes.
inline void check_code_length(const char* codec, std::size_t found, std::size_t wanted) {
  if (found != wanted) throw_error<value_error>({codec, ": a code of ", found, " bytes, not ", wanted});
}

}  // namespace detail

PUFFERFISH_NAMESPACE_END
