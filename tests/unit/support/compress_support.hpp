// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include <pufferfish/compress/compression.hpp>
#include <pufferfish/distributed/exchange.hpp>

/// What tests of compressors share: parameters of odd shapes, and PowerSGD and Signum written down serially
/// over the gradients of all ranks.
namespace compress_support {

using namespace pufferfish;

/// Parameters without layers: vectors, none, one element, thin, square, wide, a convolution, an embedding.
template <class T>
struct odd_parameters {
  std::vector<parameter<T>> all;
  parameter_store<T> store;

  odd_parameters() {
    const auto add = [this](const logical_layout& layout) {
      all.emplace_back(layout, parameter_role::weight);
    };
    add(logical_layout::vector(11));
    add(logical_layout::matrix(7, 5));
    add(logical_layout::kernel(6, 3, 3, 3));
    add(logical_layout::vector(0));
    add(logical_layout::vector(1));
    add(logical_layout::matrix(1, 9));
    add(logical_layout::matrix(9, 1));
    add({2, {13, 6, 1, 1}, {6, 1, 0, 0}});
    add(logical_layout::matrix(1, 1));
    add(logical_layout::matrix(0, 4));
    add(logical_layout::matrix(40, 17));
    add(logical_layout::kernel(8, 16, 1, 1));
    store.pack([this](state_visitor<T>& visitor) {
      int number = 0;
      for (parameter<T>& p : all) {
        std::string name = "p";
        name += std::to_string(number++);
        visitor.on_parameter(name, p);
      }
    });
  }
};

/// The gradient arena of one rank at one step, in double; `store` in T gets the same, rounded.
template <class T>
std::vector<double> gradients_of(const parameter_store<T>& store, int rank, std::uint64_t step) {
  std::vector<T> values(store.values().size());
  fill_normal(std::span<T>(values), 1.0, random_stream(step + 1, static_cast<std::uint64_t>(rank) + 7));
  return {values.begin(), values.end()};
}

template <class T>
void set_gradients(parameter_store<T>& store, int rank, std::uint64_t step) {
  const std::vector<double> values = gradients_of(store, rank, step);
  std::transform(values.begin(), values.end(), store.gradients().begin(),
                 [](double value) { return static_cast<T>(value); });
}

inline std::vector<double> mean_of(const std::vector<std::vector<double>>& all) {
  std::vector<double> result(all[0].size(), 0.0);
  for (const auto& one : all) {
    for (std::size_t i = 0; i < one.size(); ++i) result[i] += one[i] / static_cast<double>(all.size());
  }
  return result;
}

/// PowerSGD over all ranks, as in the header's formulas, in double and with plain loops.
template <class T>
class serial_power_sgd {
 public:
  /// `q`: the first Q of all matrices, as the compressor lists them.
  serial_power_sgd(const parameter_store<T>& store, const power_sgd_options& options, int ranks,
                   std::span<const T> q)
      : options_(options), memory_(static_cast<std::size_t>(ranks)) {
    std::size_t at = 0;
    for (const auto& entry : store.parameters()) {
      const logical_layout& layout = entry.thing->layout();
      matrix m{entry.offset, entry.thing->size(), 1, 0, {}};
      if (layout.dims >= 2 && m.size > 0) {
        // An embedding is the one whose first extent is not the innermost.
        m.columns = layout.strides[0] == 1 ? layout.shape[0] : layout.shape[1];
        const index_t rows = m.size / m.columns;
        m.rank = std::min({options.rank, rows, m.columns});
        if (static_cast<double>(m.rank * (rows + m.columns)) * options.least_saving >=
            static_cast<double>(m.size)) {
          m.rank = 0;
        }
        for (index_t i = 0; i < rows * m.rank; ++i) m.q.push_back(static_cast<double>(q[at++]));
      }
      matrices_.push_back(m);
    }
    for (auto& memory : memory_) memory.assign(store.values().size(), 0.0);
  }

  const std::vector<std::vector<double>>& memory() const { return memory_; }

  std::vector<double> step(const std::vector<std::vector<double>>& gradients) {
    const std::vector<double> mean = mean_of(gradients);
    std::vector<double> result = mean;
    for (matrix& m : matrices_) {
      if (m.rank > 0) compress(m, gradients, result);
    }
    return result;
  }

 private:
  struct matrix {
    index_t offset, size, columns, rank;
    std::vector<double> q;  // rows x rank
  };

  void compress(matrix& m, const std::vector<std::vector<double>>& gradients, std::vector<double>& result) {
    const index_t rows = m.size / m.columns, rank = m.rank, columns = m.columns;
    const auto at = [&](index_t i, index_t j) {
      return static_cast<std::size_t>(m.offset + i * columns + j);
    };
    const auto n = [](index_t i) { return static_cast<std::size_t>(i); };
    std::vector<double> p(n(columns * rank), 0.0), mean_q(n(rows * rank), 0.0);
    const double ranks = static_cast<double>(gradients.size());
    for (std::size_t w = 0; w < gradients.size(); ++w) {
      for (index_t i = 0; i < rows; ++i) {
        for (index_t j = 0; j < columns; ++j) {
          memory_[w][at(i, j)] += gradients[w][at(i, j)];
          for (index_t k = 0; k < rank; ++k)
            p[n(j * rank + k)] += memory_[w][at(i, j)] * m.q[n(i * rank + k)];
        }
      }
    }
    for (index_t k = 0; k < rank; ++k) {  // modified Gram-Schmidt, twice
      for (index_t other = 0; other < 2 * k; ++other) {
        double dot = 0;
        for (index_t j = 0; j < columns; ++j) dot += p[n(j * rank + k)] * p[n(j * rank + other % k)];
        for (index_t j = 0; j < columns; ++j) p[n(j * rank + k)] -= dot * p[n(j * rank + other % k)];
      }
      double norm = 0;
      for (index_t j = 0; j < columns; ++j) norm += p[n(j * rank + k)] * p[n(j * rank + k)];
      for (index_t j = 0; j < columns; ++j) p[n(j * rank + k)] /= std::sqrt(norm);
    }
    for (auto& memory : memory_) {
      std::vector<double> q(n(rows * rank), 0.0);
      for (index_t i = 0; i < rows; ++i) {
        for (index_t k = 0; k < rank; ++k) {
          for (index_t j = 0; j < columns; ++j) q[n(i * rank + k)] += memory[at(i, j)] * p[n(j * rank + k)];
          mean_q[n(i * rank + k)] += q[n(i * rank + k)] / ranks;
        }
        if (options_.feedback != error_feedback::local) continue;
        for (index_t j = 0; j < columns; ++j) {
          for (index_t k = 0; k < rank; ++k) memory[at(i, j)] -= q[n(i * rank + k)] * p[n(j * rank + k)];
        }
      }
    }
    for (index_t i = 0; i < rows; ++i) {
      for (index_t j = 0; j < columns; ++j) {
        double value = 0;
        for (index_t k = 0; k < rank; ++k) value += mean_q[n(i * rank + k)] * p[n(j * rank + k)];
        result[at(i, j)] = value;
        if (options_.feedback == error_feedback::local) continue;
        for (auto& memory : memory_) memory[at(i, j)] -= value;
      }
    }
    m.q = mean_q;
  }

  power_sgd_options options_;
  std::vector<matrix> matrices_;
  std::vector<std::vector<double>> memory_;
};

/// Signum over all ranks by counting.
class serial_signum {
 public:
  explicit serial_signum(double momentum) : momentum_(momentum) {}

  std::vector<double> step(const std::vector<std::vector<double>>& gradients) {
    const bool first = kept_.empty();
    if (first) kept_ = gradients;
    std::vector<double> result(gradients[0].size());
    for (std::size_t i = 0; i < result.size(); ++i) {
      int votes = 0;
      for (std::size_t w = 0; w < gradients.size(); ++w) {
        if (!first) kept_[w][i] = momentum_ * kept_[w][i] + (1.0 - momentum_) * gradients[w][i];
        votes += kept_[w][i] < 0.0 || (kept_[w][i] == 0.0 && odd_) ? -1 : 1;
      }
      result[i] = votes > 0 ? 1.0 : votes < 0 ? -1.0 : 0.0;
    }
    odd_ = !odd_;
    return result;
  }

 private:
  double momentum_;
  bool odd_ = false;  // step: zero votes for -1
  std::vector<std::vector<double>> kept_;
};

template <class T>
double largest_difference(std::span<const T> a, const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0.0 : 1e300;
  for (std::size_t i = 0; i < b.size() && i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - b[i]);
    if (!(difference <= largest)) largest = difference;
  }
  return largest;
}

}  // namespace compress_support
