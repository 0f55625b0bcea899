// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `tensor_info` and `tensor_entry`: a tensor in a file, and a tensor to be written; conversion of their
/// elements. The file format is described in safetensors.hpp.

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

/// One tensor of an open file. Its data is little-endian and in row-major order.
struct tensor_info {
  tensor_dtype dtype{};
  std::vector<index_t> shape;
  std::span<const std::uint8_t> bytes;  ///< memory of the file object; need not be aligned

  /// Number of elements: the product of the shape, 1 for an empty shape.
  index_t count() const { return static_cast<index_t>(bytes.size() / size_of(dtype)); }
};

/// One tensor to be written, little-endian and in row-major order. `bytes` is only read, and only during the
/// call that writes the file.
struct tensor_entry {
  std::string name;  ///< UTF-8; unique in a file
  tensor_dtype dtype{};
  std::vector<index_t> shape;
  std::span<const std::uint8_t> bytes;
};

/// Makes an entry for a writer. The entry refers to the caller's elements, which must stay in memory until
/// the file has been written. The writer checks that the elements fit the shape.
template <class T, std::size_t N>
tensor_entry make_tensor_entry(std::string name, std::vector<index_t> shape, std::span<T, N> elements) {
  return {std::move(name),
          dtype_of_v<std::remove_const_t<T>>,
          std::move(shape),
          {reinterpret_cast<const std::uint8_t*>(elements.data()), elements.size_bytes()}};
}

namespace detail {

/// Largest number of dimensions of a tensor in a file.
inline constexpr std::size_t max_tensor_rank = 64;

/// Size of a tensor in bytes. No value if an extent is negative or if the product of the extents does not fit
/// in index_t. The check of the product leaves out extents of 0, so that strides computed from the shape
/// cannot overflow either.
inline std::optional<std::uint64_t> tensor_bytes(tensor_dtype dtype, const std::vector<index_t>& shape) {
  index_t bytes = static_cast<index_t>(size_of(dtype));
  bool empty = false;
  for (const index_t extent : shape) {
    empty = empty || extent == 0;
    if (extent < 0 || (extent > 0 && __builtin_mul_overflow(bytes, extent, &bytes))) return std::nullopt;
  }
  return empty ? 0 : static_cast<std::uint64_t>(bytes);
}

/// Throws shape_error, naming file and tensor, unless the entry has exactly the bytes that its dtype and
/// shape need, and at most max_tensor_rank dimensions.
inline void check_entry(const tensor_entry& entry, const std::string& file) {
  if (tensor_bytes(entry.dtype, entry.shape) == entry.bytes.size() && entry.shape.size() <= max_tensor_rank) {
    return;
  }
  throw_error<shape_error>({file, ": tensor ", quote_name(entry.name), " of dtype ", to_string(entry.dtype),
                            " and shape ", shape_text(entry.shape), " cannot have ", entry.bytes.size(),
                            " bytes"});
}

/// Calls visit(T()) with the scalar type T of F32, F64, F16 or BF16, and returns true. Other element types:
/// no call, returns false.
template <class Visit>
bool visit_floating(tensor_dtype dtype, const Visit& visit) {
  const auto visit_if = [&](tensor_dtype one, auto value) {
    if (dtype == one) visit(value);
    return dtype == one;
  };
  return visit_if(tensor_dtype::f32, float()) || visit_if(tensor_dtype::f64, double()) ||
         visit_if(tensor_dtype::bf16, bfloat16()) || visit_if(tensor_dtype::f16, float16());
}

/// Converts to.size() elements of F32, F64, F16 or BF16, which need not be aligned, to the type To (see
/// scalar_cast), and returns true. Other element types: does nothing and returns false. `from` has the bytes
/// of to.size() elements.
template <class To>
bool convert_floating(tensor_dtype dtype, std::span<const std::uint8_t> from, std::span<To> to) {
  return visit_floating(dtype, [&]<class From>(From value) {
    for (std::size_t i = 0; i < to.size(); ++i) {
      std::memcpy(&value, from.data() + i * sizeof(From), sizeof(From));
      to[i] = scalar_cast<To>(value);
    }
  });
}

/// Converts floating-point elements to another floating-point element type (F32, F64, F16 or BF16) and
/// appends their bytes to `to`. Other element types: appends nothing.
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
