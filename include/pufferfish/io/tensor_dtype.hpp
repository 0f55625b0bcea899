// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The element types that a file of tensors can hold, with their names and sizes.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

#include <pufferfish/core/config.hpp>
#include <pufferfish/core/scalar.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Element types that occupy whole bytes, under their names in the safetensors format. The number in a name
/// is the number of bits of an element; c64 is a complex number of two f32. Elements of boolean, the f8 types
/// and c64 can be described and copied as bytes, but have no C++ type here (dtype_of_v).
enum class tensor_dtype : std::uint8_t {
  boolean,
  u8,
  i8,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  u16,
  i16,
  f16,
  bf16,
  u32,
  i32,
  f32,
  u64,
  i64,
  f64,
  c64
};

namespace detail {

/// One row of the table of element types.
struct dtype_row {
  tensor_dtype dtype;
  std::string_view name;  ///< name in the safetensors format
  std::size_t size;       ///< bytes of an element
};

/// Names and sizes of all element types, in the order of the enumerators of tensor_dtype.
inline constexpr std::array<dtype_row, 17> dtype_table{{
    {tensor_dtype::boolean, "BOOL", 1},
    {tensor_dtype::u8, "U8", 1},
    {tensor_dtype::i8, "I8", 1},
    {tensor_dtype::f8_e4m3, "F8_E4M3", 1},
    {tensor_dtype::f8_e5m2, "F8_E5M2", 1},
    {tensor_dtype::f8_e8m0, "F8_E8M0", 1},
    {tensor_dtype::u16, "U16", 2},
    {tensor_dtype::i16, "I16", 2},
    {tensor_dtype::f16, "F16", 2},
    {tensor_dtype::bf16, "BF16", 2},
    {tensor_dtype::u32, "U32", 4},
    {tensor_dtype::i32, "I32", 4},
    {tensor_dtype::f32, "F32", 4},
    {tensor_dtype::u64, "U64", 8},
    {tensor_dtype::i64, "I64", 8},
    {tensor_dtype::f64, "F64", 8},
    {tensor_dtype::c64, "C64", 8},
}};

/// The element type that holds values of a C++ type; declared for the supported types only.
constexpr tensor_dtype dtype_of(std::type_identity<std::uint8_t>) { return tensor_dtype::u8; }
constexpr tensor_dtype dtype_of(std::type_identity<std::int8_t>) { return tensor_dtype::i8; }
constexpr tensor_dtype dtype_of(std::type_identity<std::uint16_t>) { return tensor_dtype::u16; }
constexpr tensor_dtype dtype_of(std::type_identity<std::int16_t>) { return tensor_dtype::i16; }
constexpr tensor_dtype dtype_of(std::type_identity<float16>) { return tensor_dtype::f16; }
constexpr tensor_dtype dtype_of(std::type_identity<bfloat16>) { return tensor_dtype::bf16; }
constexpr tensor_dtype dtype_of(std::type_identity<std::uint32_t>) { return tensor_dtype::u32; }
constexpr tensor_dtype dtype_of(std::type_identity<std::int32_t>) { return tensor_dtype::i32; }
constexpr tensor_dtype dtype_of(std::type_identity<float>) { return tensor_dtype::f32; }
constexpr tensor_dtype dtype_of(std::type_identity<std::uint64_t>) { return tensor_dtype::u64; }
constexpr tensor_dtype dtype_of(std::type_identity<std::int64_t>) { return tensor_dtype::i64; }
constexpr tensor_dtype dtype_of(std::type_identity<double>) { return tensor_dtype::f64; }

}  // namespace detail

/// The element type that holds values of T: a fixed-width integer, float, double, bfloat16 or float16. For
/// other types this variable does not compile. bool is among them, because a byte from a file may not be a
/// valid bool.
template <class T>
inline constexpr tensor_dtype dtype_of_v = detail::dtype_of(std::type_identity<T>());

/// Name of an element type in the safetensors format: "F32", "BF16", ...
constexpr std::string_view to_string(tensor_dtype dtype) {
  return detail::dtype_table[static_cast<std::size_t>(dtype)].name;
}

/// Size of one element, in bytes.
constexpr std::size_t size_of(tensor_dtype dtype) {
  return detail::dtype_table[static_cast<std::size_t>(dtype)].size;
}

namespace detail {

/// Whether an element type is F32, F64, F16 or BF16. Readers convert these four into each other.
constexpr bool is_floating(tensor_dtype dtype) {
  return dtype == tensor_dtype::f32 || dtype == tensor_dtype::f64 || dtype == tensor_dtype::f16 ||
         dtype == tensor_dtype::bf16;
}

}  // namespace detail

/// The element type of a name of the safetensors format, or no value for an unknown name. Upper and lower
/// case differ.
constexpr std::optional<tensor_dtype> parse_dtype(std::string_view name) {
  for (const detail::dtype_row& row : detail::dtype_table) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

PUFFERFISH_NAMESPACE_END
