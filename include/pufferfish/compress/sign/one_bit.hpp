// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `one_bit_codec`: sends one sign per value, and per output unit the mean of its values of either sign. With
/// error feedback the method is 1-bit SGD.

#include <cstdint>
#include <string>
#include <vector>

#include <pufferfish/compress/sign/one_bit_cells.hpp>
#include <pufferfish/compress/sign/sign_codec.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of one_bit_codec.
struct one_bit_options {
  one_bit_cell cell = one_bit_cell::output_unit;  ///< the values that share two means
  code_memory memory = code_memory::error_feedback;
  code_route route = code_route::gather;  ///< gather or two_hop
};

/// Text of the options for messages, such as "1-bit, a cell per output unit, error feedback, gather".
inline std::string describe(const one_bit_options& options) {
  return detail::message(
      {"1-bit, ", to_string(options.cell), ", ", to_string(options.memory), ", ", to_string(options.route)});
}

namespace detail {

/// The kernels of one_bit.inc. Those named `rows` treat rows of `columns` values, each column in a cell of
/// its own; those named `run` treat consecutive values of one cell.
///   add_rows, add_run            plus += values >= 0, minus += values < 0, negatives += their number
///   subtract_rows, subtract_run  x -= minus where x < 0, else x -= plus
///   put_rows                     stores, adds or subtracts minus where the bit is set, else plus; the first
///                                value has bit `shift` (0 to 31) of words[0]
#define PUFFERFISH_KERNELS one_bit_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/compress/sign/one_bit.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail

/// Codes each value of D = gradients + memory by one bit. The values are grouped into cells: a cell is one
/// output unit of a matrix or kernel, a whole vector, or with options.cell = tensor a whole tensor. For each
/// cell:
///
///     a+ = mean of the D_i >= 0;  a- = mean of the D_i < 0  (0 where there is none);
///     C(D)_i = a+ where D_i >= 0, else a-
///
/// Among all codes of these signs and two numbers per cell, this one has the least squared error. D - C(D)
/// sums to 0 over each sign of each cell up to rounding.
///
/// The code, at an address that is a multiple of four: ceil(N / 32) words for all N values, bit i % 32 of
/// word i / 32 set where value i is negative; then a+ and a- as T for every cell, tensors in order, a
/// tensor's cells in the order of output units. A tensor of which only a part is coded (a stripe, see
/// two_hop_codes) has the cells of the elements in the part, in the order in which these elements touch them.
/// Sums are taken in double.
///
/// Seide, Fu, Droppo, Li and Yu, 1-Bit Stochastic Gradient Descent (INTERSPEECH 2014), whose
/// cells are columns of weight matrices; here cells are output units. The paper's first,
/// uncompressed steps are not part of the codec.
///
/// D = (1, 3, -2, 0) in one cell has a+ = 4/3 and a- = -2; the memory becomes (-1/3, 5/3, 0, -4/3). NaN
/// counts as D_i >= 0, so that a+ of its cell is NaN.
///
/// \code
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, one_bit_options{});
/// \endcode
template <class T>
class one_bit_codec {
 public:
  using value_type = T;
  using options_type = one_bit_options;
  static constexpr bool has_fixed_length = true;

  /// `tensors`: places and sizes of the coded tensors. Only options.cell affects the codes: memory and route
  /// belong to the class that sends them.
  explicit one_bit_codec(std::vector<coded_tensor> tensors, const one_bit_options& options = {})
      : tensors_(std::move(tensors)), cell_(options.cell), size_(coded_size(tensors_)) {
    for (const coded_tensor& tensor : tensors_) {
      firsts_.push_back(cell_count_);
      cells_.emplace_back(tensor, cell_);
      cell_count_ += cells_.back().count();
    }
    tasks_ = detail::one_bit_tasks(tensors_, cells_);
    sums_.resize(static_cast<std::size_t>(3 * tasks_.sums()));
  }

  /// Length of a code in bytes: 4 ceil(N / 32) for the signs of N values and 2 sizeof(T) per cell.
  std::size_t most_bytes() const {
    return word_bytes() + static_cast<std::size_t>(2 * cell_count_) * sizeof(T);
  }

  /// Writes the code of D = gradients + memory to `code`, and D - C(D) to the memory (see gradient_codec).
  /// `place` is ignored: the code is deterministic. Returns most_bytes().
  std::size_t encode(context<device::cpu>& ctx, const code_place&, std::span<const T> gradients,
                     std::span<T> memory, std::span<std::byte> code) {
    const auto pack = PUFFERFISH_KERNEL(widest_isa(), detail::sign_passes, momentum_signs<T>);
    auto* const words = reinterpret_cast<std::uint32_t*>(code.data());
    std::fill(sums_.begin(), sums_.end(), 0.0);
    tasks_.for_each(ctx, [&](index_t begin, index_t end, std::span<const detail::one_bit_part> parts) {
      constexpr index_t piece = 8192;  // values that stay in the cache from the signs to the sums
      T without_memory[piece];
      for (index_t at = begin; at < end; at += piece) {
        const index_t next = std::min(end, at + piece);
        T* const values = memory.empty() ? without_memory : memory.data() + at;
        if (memory.empty()) std::fill_n(values, next - at, T(0));
        pack(memory.empty() ? T(0) : T(1), T(1), false, gradients.data() + at, values,
             words + at / detail::signs_a_word, next - at);
        for (const detail::one_bit_part& part : parts) add_part(part, at, next, values);
      }
    });
    const means means_of_cells = mean_of_sums();
    for (std::size_t c = 0; c < means_of_cells.plus.size(); ++c) {
      detail::write_at(code, word_bytes() + 2 * c * sizeof(T), means_of_cells.plus[c]);
      detail::write_at(code, word_bytes() + (2 * c + 1) * sizeof(T), means_of_cells.minus[c]);
    }
    if (!memory.empty()) subtract(ctx, means_of_cells, memory);
    return most_bytes();
  }

  /// Stores, adds or subtracts the decoded values; see gradient_codec. Throws value_error, with `to`
  /// unchanged, unless the code has most_bytes() bytes. All bits are valid.
  void decode(context<device::cpu>& ctx, std::span<const std::byte> code, decode_as as,
              std::span<T> to) const {
    detail::check_code_length("one_bit_codec", code.size(), most_bytes());
    const auto rows_kernel = PUFFERFISH_KERNEL(widest_isa(), detail::one_bit_passes, put_rows<T>);
    const auto run_kernel = PUFFERFISH_KERNEL(widest_isa(), detail::sign_code_passes, put_bits<T>);
    const auto* const words = reinterpret_cast<const std::uint32_t*>(code.data());
    means of(static_cast<std::size_t>(cell_count_));
    for (std::size_t c = 0; c < of.plus.size(); ++c) {
      of.plus[c] = detail::read_at<T>(code, word_bytes() + 2 * c * sizeof(T));
      of.minus[c] = detail::read_at<T>(code, word_bytes() + (2 * c + 1) * sizeof(T));
    }
    for_each_part(ctx, [&](index_t offset, std::size_t first, auto&& for_each) {
      const T* const plus = of.plus.data() + first;
      const T* const minus = of.minus.data() + first;
      for_each(
          [&](index_t at, index_t rows, index_t columns, index_t cell) {
            rows_kernel(as, words + (offset + at) / detail::signs_a_word,
                        (offset + at) % detail::signs_a_word, rows, columns, plus + cell, minus + cell,
                        to.data() + offset + at);
          },
          [&](index_t at, index_t length, index_t cell) {
            run_kernel(as, words + (offset + at) / detail::signs_a_word, (offset + at) % detail::signs_a_word,
                       minus[cell], plus[cell], to.data() + offset + at, length);
          });
    });
  }

  /// Text of the options on which codes depend. The class that sends the codes adds memory and route.
  std::string describe() const { return detail::message({"1-bit, ", to_string(cell_)}); }

 private:
  // The means a+ (of values >= 0) and a- (of values < 0) of all cells.
  struct means {
    explicit means(std::size_t cells) : plus(cells), minus(cells) {}
    std::vector<T> plus, minus;
  };

  // Number of bytes of the signs of a code, before the means.
  std::size_t word_bytes() const {
    return static_cast<std::size_t>((size_ + detail::signs_a_word - 1) / detail::signs_a_word) *
           sizeof(std::uint32_t);
  }

  // Calls f(offset, first, for_each) for each part of a tensor in a task: the tensor's offset, its first cell
  // among all cells, and for_each(rows, run), which is tensor_cells::for_each for the part's elements.
  template <class F>
  void for_each_part(context<device::cpu>& ctx, const F& f) const {
    tasks_.for_each(ctx, [&](index_t, index_t, std::span<const detail::one_bit_part> parts) {
      for (const detail::one_bit_part& part : parts) {
        const index_t offset = tensors_[part.tensor].offset;
        f(offset, static_cast<std::size_t>(firsts_[part.tensor]), [&](const auto& rows, const auto& run) {
          cells_[part.tensor].for_each(part.begin - offset, part.end - offset, rows, run);
        });
      }
    });
  }

  // Adds the part's values in [begin, end) to the part's sums; values[0] is value `begin`.
  void add_part(const detail::one_bit_part& part, index_t begin, index_t end, const T* values) {
    const auto add_rows = PUFFERFISH_KERNEL(widest_isa(), detail::one_bit_passes, add_rows<T>);
    const auto add_run = PUFFERFISH_KERNEL(widest_isa(), detail::one_bit_passes, add_run<T>);
    const detail::tensor_cells& cells = cells_[part.tensor];
    const index_t offset = tensors_[part.tensor].offset;
    const T* const origin = values - begin + offset;
    double* const plus = sums_.data() + 3 * part.first_sum;
    double *const minus = plus + part.sums, *const negatives = minus + part.sums;
    cells.for_each(
        std::max(begin, part.begin) - offset, std::min(end, part.end) - offset,
        [&](index_t at, index_t rows, index_t columns, index_t cell) {
          add_rows(origin + at, rows, columns, plus + cell, minus + cell, negatives + cell);
        },
        [&](index_t at, index_t length, index_t cell) {
          const index_t i = (cell - part.first_cell + cells.units()) % cells.units();
          add_run(origin + at, length, plus + i, minus + i, negatives + i);
        });
  }

  // Adds the sums of all parts of a cell, in the order of the parts, and divides them.
  means mean_of_sums() const {
    std::vector<double> all(static_cast<std::size_t>(3 * cell_count_), 0.0);
    for (const detail::one_bit_part& part : tasks_.parts()) {
      for (index_t i = 0; i < part.sums; ++i) {
        const index_t cell = (part.first_cell + i) % cells_[part.tensor].units();
        for (index_t k = 0; k < 3; ++k) {
          all[static_cast<std::size_t>(3 * (firsts_[part.tensor] + cell) + k)] +=
              sums_[static_cast<std::size_t>(3 * part.first_sum + k * part.sums + i)];
        }
      }
    }
    means result(static_cast<std::size_t>(cell_count_));
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      for (index_t cell = 0; cell < cells_[t].count(); ++cell) {
        const auto c = static_cast<std::size_t>(firsts_[t] + cell);
        const double below = all[3 * c + 2], above = static_cast<double>(cells_[t].size_of(cell)) - below;
        result.plus[c] = static_cast<T>(above > 0.0 ? all[3 * c] / above : 0.0);
        result.minus[c] = static_cast<T>(below > 0.0 ? all[3 * c + 1] / below : 0.0);
      }
    }
    return result;
  }

  // Computes memory -= C(memory), which changes D to D - C(D).
  void subtract(context<device::cpu>& ctx, const means& of, std::span<T> memory) const {
    const auto rows_kernel = PUFFERFISH_KERNEL(widest_isa(), detail::one_bit_passes, subtract_rows<T>);
    const auto run_kernel = PUFFERFISH_KERNEL(widest_isa(), detail::one_bit_passes, subtract_run<T>);
    for_each_part(ctx, [&](index_t offset, std::size_t first, auto&& for_each) {
      const T* const plus = of.plus.data() + first;
      const T* const minus = of.minus.data() + first;
      T* const values = memory.data() + offset;
      for_each([&](index_t at, index_t rows, index_t columns,
                   index_t cell) { rows_kernel(values + at, rows, columns, plus + cell, minus + cell); },
               [&](index_t at, index_t length, index_t cell) {
                 run_kernel(values + at, length, plus[cell], minus[cell]);
               });
    });
  }

  std::vector<coded_tensor> tensors_;
  one_bit_cell cell_;
  index_t size_;
  std::vector<detail::tensor_cells> cells_;  // cells of each tensor
  std::vector<index_t> firsts_;              // number of each tensor's first cell
  index_t cell_count_ = 0;
  detail::one_bit_tasks tasks_;
  std::vector<double> sums_;  // per part, for all its cells: sums of D >= 0, sums of D < 0, numbers of D < 0
};

/// Makes a compressor with one_bit_codec for the gradients of `store`: with error feedback 1-bit SGD. Throws
/// value_error for the route `sparse`.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const one_bit_options& options) {
  return make_coded_compressor<one_bit_codec<T>>(store, options, options.memory, options.route);
}

PUFFERFISH_NAMESPACE_END
