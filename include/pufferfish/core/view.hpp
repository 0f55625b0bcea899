// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `tensor_view<T, N>`: pointer, extents and strides; owns nothing. It is the only tensor type in the
/// signatures of layers, the gradient exchange and adapters.
///
/// \code
/// tensor<float, 2> weight({64, 128});               // owns 64 x 128 elements
/// tensor_view<float, 2> rows = weight;              // no copy
/// auto left = rows.slice(1, 0, 32);                 // 64 x 32, row stride 128
/// auto flipped = transpose(left);                   // 32 x 64, the same elements
/// tensor<float, 2> dense(flipped);                  // a dense copy
/// \endcode
///
/// A view is valid as long as the memory that it refers to. Views may be copied and passed between threads;
/// the library does not synchronize accesses to the elements.

#include <array>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <type_traits>

#include <pufferfish/core/assert.hpp>
#include <pufferfish/core/config.hpp>
#include <pufferfish/core/error.hpp>
#include <pufferfish/core/message.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Type of sizes and indices. It is signed, so that differences and strides need no casts.
using index_t = std::ptrdiff_t;

/// Extents or strides of N dimensions, in elements, slowest dimension first where the memory is dense.
template <std::size_t N>
using extents = std::array<index_t, N>;

namespace detail {

/// Product of `dims` extents, or -1 if one of them is negative or if the product does not fit in index_t.
/// Zero extents count as 1 in the overflow check, so that strides computed from the
/// shape cannot overflow either.
constexpr index_t checked_volume(const index_t* shape, std::size_t dims) {
  index_t product = 1;
  bool empty = false, fits = true;
  for (std::size_t i = 0; i < dims; ++i) {
    const index_t extent = shape[i] == 0 ? 1 : shape[i];
    empty = empty || shape[i] == 0;
#if defined(__GNUC__) || defined(__clang__)
    fits = !__builtin_mul_overflow(product, extent, &product) && extent > 0 && fits;
#else
    fits = fits && extent > 0 && product <= std::numeric_limits<index_t>::max() / extent;
    product = fits ? product * extent : 1;
#endif
  }
  return !fits ? -1 : empty ? 0 : product;
}

/// Throws shape_error for extents whose checked_volume is -1.
[[noreturn]] PUFFERFISH_COLD inline void bad_extents(const index_t* shape, std::size_t dims) {
  for (std::size_t i = 0; i < dims; ++i) {
    if (shape[i] < 0) throw_error<shape_error>({"negative extent in ", shape_text(shape, dims)});
  }
  throw_error<shape_error>({shape_text(shape, dims), " has more elements than ",
                            std::numeric_limits<index_t>::max(), ", the most that can be counted"});
}
/// Throws shape_error for a count that byte_count refuses; `size` is the size of an element in bytes.
[[noreturn]] PUFFERFISH_COLD inline void bad_count(index_t count, std::size_t size) {
  if (count < 0) throw_error<shape_error>({"negative size ", count});
  throw_error<shape_error>({count, " elements of ", size, " bytes have more bytes than ",
                            std::numeric_limits<index_t>::max(), ", the most that can be counted"});
}

/// Number of bytes of `count` elements of T. Throws shape_error for a negative count and for more bytes than
/// index_t counts.
template <class T>
constexpr std::size_t byte_count(index_t count) {
  constexpr std::size_t most = static_cast<std::size_t>(std::numeric_limits<index_t>::max()) / sizeof(T);
  if (static_cast<std::size_t>(count) > most) bad_count(count, sizeof(T));
  return static_cast<std::size_t>(count) * sizeof(T);
}

}  // namespace detail

/// Product of all extents; 1 for an empty list. Throws shape_error for a negative extent, and if the product
/// does not fit in index_t.
template <std::size_t N>
constexpr index_t volume(const extents<N>& shape) {
  const index_t result = detail::checked_volume(shape.data(), N);
  if (result < 0) detail::bad_extents(shape.data(), N);
  return result;
}

/// Strides (in elements) of a dense array whose last index runs fastest. Throws shape_error as volume does.
template <std::size_t N>
constexpr extents<N> row_major(const extents<N>& shape) {
  static_cast<void>(volume<N>(shape));
  extents<N> strides{};
  index_t step = 1;
  for (std::size_t i = N; i-- > 0;) {
    strides[i] = step;
    step *= shape[i];
  }
  return strides;
}

/// Text of a shape as in error messages, such as "[2 x 8 x 8 x 64]".
template <std::size_t N>
std::string to_string(const extents<N>& shape) {
  return detail::shape_text(shape.data(), N);
}

namespace detail {

// The following functions are not templates, so that views of all types share one compiled copy.

/// Throws shape_error for flat() of a view of this shape whose elements are not contiguous.
[[noreturn]] PUFFERFISH_COLD inline void not_contiguous(const index_t* shape, std::size_t dims) {
  throw_error<shape_error>({"tensor_view: flat() of a strided view ", shape_text(shape, dims)});
}
/// Throws shape_error, with both shapes, for reshape() of a view with shape `from` to shape `to`.
[[noreturn]] PUFFERFISH_COLD inline void cannot_reshape(const index_t* from, std::size_t from_dims,
                                                        const index_t* to, std::size_t to_dims) {
  throw_error<shape_error>(
      {"tensor_view: cannot reshape ", shape_text(from, from_dims), " to ", shape_text(to, to_dims)});
}
/// Whether the strides are those of row_major, apart from dimensions of extent 0 or 1.
PUFFERFISH_NOINLINE constexpr bool is_contiguous(const index_t* shape, const index_t* strides,
                                                 std::size_t dims) {
  index_t step = 1;
  for (std::size_t i = dims; i-- > 0;) {
    if (shape[i] > 1 && strides[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

}  // namespace detail

/// A strided array of N dimensions over memory owned by the caller. Copying a view copies no elements. `T`
/// may be const. Strides are in elements and may be in any order: in an OIHW view of a weight stored as HWIO,
/// the output channels have stride 1.
/// The number of elements is at most the largest index_t. Strides may be 0 (a broadcast dimension) or
/// negative; a view with such strides is not contiguous and must not be written through if elements coincide.
template <class T, std::size_t N>
class tensor_view {
 public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;

  /// Makes a null view: no memory, all extents 0.
  constexpr tensor_view() = default;

  /// Makes a dense view of memory at `data`, last index fastest. Throws shape_error as volume does. `data`
  /// may be nullptr: a view of this shape without memory (is_null).
  constexpr tensor_view(T* data, const extents<N>& shape)
      : data_(data), extents_(shape), strides_(row_major<N>(shape)) {}

  /// Makes a view with given strides, in elements. Throws shape_error as volume does. Whether the strides
  /// stay within the memory is the caller's responsibility.
  constexpr tensor_view(T* data, const extents<N>& shape, const extents<N>& strides)
      : data_(data), extents_(shape), strides_(strides) {
    static_cast<void>(volume<N>(shape));
  }

  /// Converts a view of a type to a view of the const type (T = const U).
  template <class U>
  requires(std::is_same_v<const U, T> &&
           !std::is_same_v<U, T>) constexpr tensor_view(const tensor_view<U, N>& other)
      : data_(other.data()), extents_(other.shape()), strides_(other.strides()) {}

  /// Address of element (0, ..., 0); nullptr for a null view.
  constexpr T* data() const { return data_; }
  /// Extents of all dimensions.
  constexpr const extents<N>& shape() const { return extents_; }
  /// Strides, in elements.
  constexpr const extents<N>& strides() const { return strides_; }
  /// Extent of dimension i, and its stride in elements. i < N is not checked.
  constexpr index_t extent(std::size_t i) const { return extents_[i]; }
  constexpr index_t stride(std::size_t i) const { return strides_[i]; }
  /// Number of elements. The product cannot overflow: the constructors have checked it.
  constexpr index_t size() const {
    index_t result = 1;
    for (index_t extent : extents_) result *= extent;
    return result;
  }
  /// Whether the view has no elements: an extent is 0.
  constexpr bool empty() const { return size() == 0; }

  /// True for a view without memory. As an argument it means, for example, that a gradient is not wanted.
  constexpr bool is_null() const { return data_ == nullptr; }

  /// Element (i...). Indices are checked at assertion level 2 only (PUFFERFISH_ASSERT_LEVEL); an index
  /// outside the view is undefined behavior otherwise. A view of T gives write access even if the view itself
  /// is const.
  template <class... I>
  requires(sizeof...(I) == N) constexpr T& operator()(I... i) const {
    const extents<N> at{static_cast<index_t>(i)...};
    index_t offset = 0;
    for (std::size_t d = 0; d < N; ++d) {
      PUFFERFISH_ASSERT_FULL(at[d] >= 0 && at[d] < extents_[d], "index_t outside the view");
      offset += at[d] * strides_[d];
    }
    return data_[offset];
  }

  /// True if the elements are stored contiguously, last index fastest. (Strides of dimensions of
  /// extent 0 or 1 are ignored.)
  constexpr bool is_contiguous() const { return detail::is_contiguous(extents_.data(), strides_.data(), N); }

  /// The elements of a contiguous view in row-major order, without a copy. Throws shape_error for any other
  /// view; an empty view has an empty span.
  constexpr std::span<T> flat() const {
    if (!empty() && !is_contiguous()) {
      detail::not_contiguous(extents_.data(), N);
    }
    return {data_, static_cast<std::size_t>(size())};
  }

  /// Returns the same elements, in row-major order, under other extents; no copy. Contiguous views only.
  /// Throws shape_error if the volumes differ, if the view is not contiguous, and as volume does.
  ///
  ///     auto pixels = images.reshape<2>({n * h * w, c});  // images: a view [n][h][w][c]
  template <std::size_t M>
  constexpr tensor_view<T, M> reshape(const extents<M>& shape) const {
    if (volume<M>(shape) != size() || (!empty() && !is_contiguous())) {
      detail::cannot_reshape(extents_.data(), N, shape.data(), M);
    }
    return tensor_view<T, M>(data_, shape);
  }

  /// Returns a view of the indices begin .. begin + count - 1 of dimension d, without a copy. A range outside
  /// the view fails an assertion (PUFFERFISH_ASSERT_LEVEL 1 or 2), which ends the program.
  constexpr tensor_view slice(std::size_t d, index_t begin, index_t count) const {
    PUFFERFISH_ASSERT(d < N && begin >= 0 && count >= 0 && count <= extents_[d] - begin,
                      "slice outside the view");
    extents<N> shape = extents_;
    shape[d] = count;
    return tensor_view(data_ == nullptr ? nullptr : data_ + begin * strides_[d], shape, strides_);
  }

  /// Returns a view with the dimensions in another order, without a copy: dimension i of the result is
  /// dimension order[i] of this view. `order` must be a permutation of 0 .. N - 1, which is not checked. An
  /// NHWC image as NCHW: view.permute({0, 3, 1, 2}).
  constexpr tensor_view permute(const std::array<std::size_t, N>& order) const {
    extents<N> shape{};
    extents<N> strides{};
    for (std::size_t i = 0; i < N; ++i) {
      shape[i] = extents_[order[i]];
      strides[i] = strides_[order[i]];
    }
    return tensor_view(data_, shape, strides);
  }

 private:
  T* data_ = nullptr;
  extents<N> extents_{};
  extents<N> strides_{};
};

/// Returns the view with its two dimensions swapped, without a copy.
template <class T>
constexpr tensor_view<T, 2> transpose(const tensor_view<T, 2>& view) {
  return view.permute({1, 0});
}

/// Copies to(i...) = U(from(i...)) for all elements, for any strides and with conversion of the scalar.
/// Throws shape_error unless the shapes are equal. The views must not overlap unless they are identical. Runs
/// in the calling thread on the host. Both views must have memory unless they are empty.
///
/// \code
/// tensor<double, 4> nhwc({2, 8, 8, 3});
/// tensor<float, 4> nchw({2, 3, 8, 8});
/// copy(nhwc.view().permute({0, 3, 1, 2}), nchw.view());  // another order of dimensions, rounded to float
/// \endcode
template <class T, class U, std::size_t N>
void copy(const tensor_view<T, N>& from, const tensor_view<U, N>& to) {
  if (from.shape() != to.shape()) {
    detail::throw_error<shape_error>({"copy: source is ", from.shape(), ", target ", to.shape()});
  }
  if (from.empty()) return;
  // The innermost loop runs over the dimension of the smallest source stride. Blocks of it limit the number
  // of cache lines of the target that are written at the same time.
  const auto distance = [&from](std::size_t d) {
    return from.stride(d) < 0 ? -from.stride(d) : from.stride(d);
  };
  std::size_t inner = N - 1;
  for (std::size_t d = N; d-- > 0;) {
    if (from.extent(d) == 1) continue;
    if (from.extent(inner) == 1 || distance(d) < distance(inner)) inner = d;
  }
  const index_t all = from.extent(inner), block = inner + 1 == N ? all : 16;
  const index_t read_step = from.stride(inner), write_step = to.stride(inner);
  for (index_t first = 0; first < all; first += block) {
    const index_t count = all - first < block ? all - first : block;
    extents<N> at{};
    at[inner] = first;
    for (;;) {
      index_t source = 0;
      index_t target = 0;
      for (std::size_t d = 0; d < N; ++d) {
        source += at[d] * from.stride(d);
        target += at[d] * to.stride(d);
      }
      for (index_t i = 0; i < count; ++i) {
        to.data()[target + i * write_step] = static_cast<U>(from.data()[source + i * read_step]);
      }
      std::size_t d = N;
      while (d > 0 && (d - 1 == inner || ++at[d - 1] == from.extent(d - 1))) {
        if (--d != inner) at[d] = 0;
      }
      if (d == 0) break;
    }
  }
}

PUFFERFISH_NAMESPACE_END
