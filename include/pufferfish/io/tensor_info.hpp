// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// A tensor in a file: its description, and conversion of its elements. The format is in safetensors.hpp.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/tensor_dtype.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Default size limit of the readers of tensor files: 64 GiB.
inline constexpr std::uint64_t default_tensor_file_limit = std::uint64_t{1} << 36;

/// One tensor of an open file, little-endian and in row-major order.
/// `bytes` points into the file object and need not be aligned.
struct tensor_info {
  tensor_dtype dtype{};
  std::vector<index_t> shape;
  std::span<const std::uint8_t> bytes;

  /// Number of elements: the product of the shape, 1 for an empty shape.
  index_t count() const { return static_cast<index_t>(bytes.size() / size_of(dtype)); }
};

/// One tensor to be written. `bytes` is only read, and only during the call.
/// The bytes are little-endian and in row-major order.
struct tensor_entry {
  std::string name;
  tensor_dtype dtype{};
  std::vector<index_t> shape;
  std::span<const std::uint8_t> bytes;
};

/// An entry for a writer that refers to the caller's elements; they must stay in place until it is written.
template <class T, std::size_t N>
tensor_entry make_tensor_entry(std::string name, std::vector<index_t> shape, std::span<T, N> elements) {
  return {std::move(name),
          dtype_of_v<std::remove_const_t<T>>,
          std::move(shape),
          {reinterpret_cast<const std::uint8_t*>(elements.data()), elements.size_bytes()}};
}

namespace detail {

inline constexpr std::size_t max_tensor_rank = 64;

/// Bytes of a tensor; nothing if an extent is negative or if the product does not fit in `index_t`. Extents
/// of 0 are left out of that product, so that strides computed from the shape cannot overflow either.
inline std::optional<std::uint64_t> tensor_bytes(tensor_dtype dtype, const std::vector<index_t>& shape) {
  index_t bytes = static_cast<index_t>(size_of(dtype));
  bool empty = false;
  for (const index_t extent : shape) {
    empty = empty || extent == 0;
    if (extent < 0 || (extent > 0 && __builtin_mul_overflow(bytes, extent, &bytes))) return std::nullopt;
  }
  return empty ? 0 : static_cast<std::uint64_t>(bytes);
}

/// Throws shape_error unless the entry has exactly the bytes that its dtype and shape need.
inline void check_entry(const tensor_entry& entry, const std::string& file) {
  if (tensor_bytes(entry.dtype, entry.shape) == entry.bytes.size() && entry.shape.size() <= max_tensor_rank) {
    return;
  }
  throw_error<shape_error>({file, ": tensor ", quote_name(entry.name), " of dtype ", to_string(entry.dtype),
                            " and shape ", shape_text(entry.shape), " cannot have ", entry.bytes.size(),
                            " bytes"});
}

/// Calls visit(T()) with the scalar of F32, F64, F16 or BF16. Other dtypes: no call, returns false.
template <class Visit>
bool visit_floating(tensor_dtype dtype, const Visit& visit) {
  const auto visit_if = [&](tensor_dtype one, auto value) {
    if (dtype == one) visit(value);
    return dtype == one;
  };
  return visit_if(tensor_dtype::f32, float()) || visit_if(tensor_dtype::f64, double()) ||
         visit_if(tensor_dtype::bf16, bfloat16()) || visit_if(tensor_dtype::f16, float16());
}

/// Converts elements of F32, F64, F16 or BF16, which need not be aligned,
/// to To (see scalar_cast). Other dtypes: does nothing and returns false.
/// `from` has to.size() elements.
template <class To>
bool convert_floating(tensor_dtype dtype, std::span<const std::uint8_t> from, std::span<To> to) {
  return visit_floating(dtype, [&]<class From>(From value) {
    for (std::size_t i = 0; i < to.size(); ++i) {
      std::memcpy(&value, from.data() + i * sizeof(From), sizeof(From));
      to[i] = scalar_cast<To>(value);
    }
  });
}

/// Converts floating-point elements to another floating-point dtype (F32, F64, F16 or BF16) and appends their
/// bytes to `to`. Other dtypes: appends nothing.
template <class From>
void append_floating(tensor_dtype dtype, std::span<const From> from, std::vector<std::uint8_t>& to) {
  visit_floating(dtype, [&]<class To>(To value) {
    std::size_t at = to.size();
    to.resize(at + from.size() * sizeof(To));
    for (const From element : from) {
      value = scalar_cast<To>(element);
      std::memcpy(to.data() + at, &value, sizeof(To));
      at += sizeof(To);
    }
  });
}

}  // namespace detail

PUFFERFISH_NAMESPACE_END
