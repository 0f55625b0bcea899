// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: common parts of the kernels of attention. A block of 128 threads works on a square tile of
/// scores, with 8 rows of threads by 16 columns: thread (y, x) has rows y, y + 8, .. and columns x, x + 16,
/// .. of the tile. Products of tiles read shared memory, 16 bytes at a time.
///
/// Shared memory of a block (attention_memory) has three parts: two operand tiles of Tile rows x 32 columns
/// of the depth with row stride operand_pitch, or in their place a tile of values of 32 x 64; the weights,
/// Tile x Tile with row stride weight_pitch; and the bits of dropout. Operands are stored there as floats,
/// whatever the element type in device memory.

#include <pufferfish/gpu/kernels/attention/attention.hpp>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

inline constexpr int attention_threads = 128;
inline constexpr int thread_columns = 16, thread_rows = attention_threads / thread_columns;
/// Depth of the operands of scores that are in shared memory at a time.
inline constexpr int tile_depth = 32;
/// Rows and columns of the values that are in shared memory at a time.
inline constexpr int value_rows = 32, value_columns = 64;

/// Row strides in shared memory, in floats. They are whole vectors, such that the 8 threads of one 16-byte
/// access read 8 rows from different banks.
inline constexpr int operand_pitch = tile_depth + 4;
template <int Tile>
inline constexpr int weight_pitch = Tile + 4;
/// Words of dropout bits per row: a tile's keys may begin anywhere in a word.
template <int Tile>
inline constexpr int kept_words = Tile / 32 + 1;

// The same numbers, and others, as sizes of arrays.
template <int Tile>
inline constexpr std::size_t tile_edge = static_cast<std::size_t>(Tile);
template <int Tile>
inline constexpr std::size_t own_rows = tile_edge<Tile> / thread_rows;
template <int Tile>
inline constexpr std::size_t own_columns = tile_edge<Tile> / thread_columns;

/// The static shared memory of a block.
template <int Tile>
struct alignas(16) attention_memory {
  float operands[2 * tile_edge<Tile> * operand_pitch];  ///< operand tiles, or a tile of values
  float weights[tile_edge<Tile> * (tile_edge<Tile> + 4)];
  std::uint32_t kept[tile_edge<Tile> * (tile_edge<Tile> / 32 + 1)];
};
static_assert(2 * 32 * operand_pitch >= value_rows * value_columns && value_columns == 4 * thread_columns);

/// Number of blocks that a multiprocessor should hold at once in the forward and the backward pass. This
/// number limits the registers of a thread.
template <int Tile>
inline constexpr int forward_blocks = Tile == 32 ? 4 : 3;
template <int Tile>
inline constexpr int backward_blocks = forward_blocks<Tile> - 1;

/// A thread's part of a tile of scores.
template <int Tile>
using tile_scores = float[own_rows<Tile>][own_columns<Tile>];
/// A thread's part of a tile of results: four neighbouring columns of each of its rows.
template <int Tile>
using tile_result = float[own_rows<Tile>][4];

/// Row in the tile of the calling thread's r-th row.
__device__ inline int tile_row(int r) { return block_thread() / thread_columns + thread_rows * r; }
/// Column in the tile of the calling thread's c-th column.
__device__ inline int tile_column(int c) { return block_thread() % thread_columns + thread_columns * c; }

/// Combines the values of the 16 threads of a row, which are neighbouring lanes of a warp. All of them
/// receive the result. `combine` must be commutative.
template <class F>
__device__ inline float row_reduce(float value, F combine) {
  for (int distance = thread_columns / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(all_lanes, value, distance));
  }
  return value;
}

/// Four neighbouring elements that are read by one access.
template <class T>
struct alignas(4 * sizeof(T)) four_of {
  T values[4];
};

/// The part of a matrix that belongs to one sequence (rows) and one head (columns).
template <class T>
struct head_rows {
  const T* data;
  index_t stride, rows;
  int columns;
  bool vectors;  ///< whether rows are aligned to four elements

  /// Rows first .. first + count - 1 of `all`, columns head depth .. (head + 1) depth - 1.
  __device__ head_rows(const row_array<const T>& all, index_t first, index_t count, int head, int depth)
      : data(all.row(first) + static_cast<index_t>(head) * depth),
        stride(all.stride),
        rows(count),
        columns(depth),
        vectors(reinterpret_cast<std::uintptr_t>(data) % sizeof(four_of<T>) == 0 && stride % 4 == 0) {}

  /// Four neighbouring elements of a row from `column` on; zeros outside of the matrix.
  __device__ vector<float> four(index_t row, int column) const {
    vector<float> result{};
    if (row >= rows) return result;
    const T* const from = data + row * stride + column;
    if (vectors && column + 4 <= columns) {
      const four_of<T> all = *reinterpret_cast<const four_of<T>*>(from);
      for (int i = 0; i < 4; ++i) result[i] = static_cast<float>(all.values[i]);
      return result;
    }
    for (int i = 0; i < 4; ++i) {
      if (column + i < columns) result[i] = static_cast<float>(from[i]);
    }
    return result;
  }
};

/// Copies Rows x Columns elements of a head to shared memory, from (row, column) on. Element (r, c) is stored
/// at r Pitch + c; elements outside of the head become zeros. All 128 threads take part. No barrier.
template <int Rows, int Columns, int Pitch, class T>
__device__ void load_tile(const head_rows<T>& from, index_t row, int column, float* to) {
  constexpr int groups = Columns / 4;
  static_assert(Rows * groups % attention_threads == 0);
#pragma unroll
  for (int step = 0; step < Rows * groups / attention_threads; ++step) {
    const int at = step * attention_threads + block_thread();
    const int r = at / groups, c = at % groups * 4;
    store_vector(to + r * Pitch + c, from.four(row + r, column + c));
  }
}

/// scores(i, j) += dot product of row left_row + i of `left` and row right_row + j of `right` over all
/// columns, 32 columns a step. All threads of the block must call this function. Their earlier writes to
/// other shared memory are visible to all of them afterwards.
template <int Tile, class T>
__device__ void add_scores(const head_rows<T>& left, index_t left_row, const head_rows<T>& right,
                           index_t right_row, float* operands, tile_scores<Tile>& scores) {
  float* const rights = operands + Tile * operand_pitch;
  int depth = 0;
  do {
    __syncthreads();
    load_tile<Tile, tile_depth, operand_pitch>(left, left_row, depth, operands);
    load_tile<Tile, tile_depth, operand_pitch>(right, right_row, depth, rights);
    __syncthreads();
    for (int k = 0; k < tile_depth; k += 4) {
      vector<float> a[own_rows<Tile>], b[own_columns<Tile>];
#pragma unroll
      for (int r = 0; r < Tile / thread_rows; ++r) {
        a[r] = load_vector<float>(operands + tile_row(r) * operand_pitch + k);
      }
#pragma unroll
      for (int c = 0; c < Tile / thread_columns; ++c) {
        b[c] = load_vector<float>(rights + tile_column(c) * operand_pitch + k);
      }
#pragma unroll
      for (int r = 0; r < Tile / thread_rows; ++r) {
#pragma unroll
        for (int c = 0; c < Tile / thread_columns; ++c) {
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[r][c] += a[r][i] * b[c][i];
        }
      }
    }
    depth += tile_depth;
  } while (depth < left.columns);
}

/// result += weights (in shared memory, Tile x Tile) times rows row .. row + Tile - 1, columns column ..
/// column + value_columns - 1 of `values`. Rows from `end` on have no weight. The function begins with a
/// barrier, so the caller needs none after writing the weights.
template <int Tile, class T>
__device__ void add_weighted(const float* weights, const head_rows<T>& values, index_t row, index_t end,
                             int column, float* operands, tile_result<Tile>& result) {
  for (int first = 0; first < Tile && row + first < end; first += value_rows) {
    __syncthreads();
    load_tile<value_rows, value_columns, value_columns>(values, row + first, column, operands);
    __syncthreads();
    for (int k = 0; k < value_rows; k += 4) {
      vector<float> a[own_rows<Tile>], b[4];
#pragma unroll
      for (int r = 0; r < Tile / thread_rows; ++r) {
        a[r] = load_vector<float>(weights + tile_row(r) * weight_pitch<Tile> + first + k);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[i] = load_vector<float>(operands + (k + i) * value_columns + 4 * tile_column(0));
      }
#pragma unroll
      for (int r = 0; r < Tile / thread_rows; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) result[r][c] += a[r][i] * b[i][c];
        }
      }
    }
  }
}

/// Writes the tile's results, each row multiplied by a factor, where their rows and columns exist. `first`:
/// row of the sequence in the matrix; `row`: first row of the tile in the sequence; `rows`: rows of the
/// sequence; `depth`: columns of a head; `column`: first column of the tile in the head. A thread has four
/// neighbouring columns from column + 4 (thread % 16) on.
template <int Tile, class T>
__device__ void store_result(const tile_result<Tile>& result, const float (&factors)[own_rows<Tile>],
                             const row_array<T>& to, index_t first, index_t row, index_t rows, int head,
                             int depth, int column) {
  const int begin = column + 4 * tile_column(0);
#pragma unroll
  for (int r = 0; r < Tile / thread_rows; ++r) {
    const index_t at = row + tile_row(r);
    if (at >= rows) continue;
    T* const place = to.row(first + at) + static_cast<index_t>(head) * depth + begin;
    if (begin + 4 <= depth && reinterpret_cast<std::uintptr_t>(place) % sizeof(four_of<T>) == 0) {
      four_of<T> all;
#pragma unroll
      for (int c = 0; c < 4; ++c) all.values[c] = static_cast<T>(result[r][c] * factors[r]);
      store_global(place, all);
      continue;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (begin + c < depth) place[c] = static_cast<T>(result[r][c] * factors[r]);
    }
  }
}

/// A tile of a run: number of the sequence, and first row of the tile in the sequence. Sequence -1: no tile.
struct run_tile {
  index_t sequence, first;
};

/// Tile `number` among the tiles of all runs, which are counted sequence by sequence, ceil(count / Tile)
/// tiles each. The result has sequence -1 if there are fewer tiles. Every warp searches by itself; all lanes
/// of a warp must call this function.
template <int Tile>
__device__ inline run_tile find_tile(const run_arrays& runs, index_t number) {
  const int lane = block_thread() % warp_threads;
  for (index_t base = 0; base < runs.sequences; base += warp_threads) {
    const index_t s = base + lane;
    const index_t tiles = s < runs.sequences ? ceil_div(runs.count[s], index_t{Tile}) : index_t{0};
    index_t end = tiles;
    for (int distance = 1; distance < warp_threads; distance *= 2) {
      const index_t below = __shfl_up_sync(all_lanes, end, static_cast<unsigned>(distance));
      if (lane >= distance) end += below;
    }
    const unsigned found = __ballot_sync(all_lanes, number < end ? 1 : 0);
    if (found != 0) {
      const int owner = __ffs(static_cast<int>(found)) - 1;
      const index_t begin = __shfl_sync(all_lanes, end - tiles, owner);
      return {base + owner, (number - begin) * Tile};
    }
    number -= __shfl_sync(all_lanes, end, warp_threads - 1);
  }
  return {-1, 0};
}

/// One head of one sequence: its rows of queries, keys and values.
template <class T>
struct attention_head {
  index_t sequence, queries, keys, first_query, first_key;
  int head;
  head_rows<T> q, k, v;

  /// Head `number` of sequence s.
  __device__ attention_head(const attention_problem<T>& p, index_t s, int number)
      : sequence(s),
        queries(p.queries.count[s]),
        keys(p.keys.count[s]),
        first_query(p.queries.first[s]),
        first_key(p.keys.first[s]),
        head(number),
        q(p.q, first_query, queries, number, p.depth),
        k(p.k, first_key, keys, number, p.depth),
        v(p.v, first_key, keys, number, p.value_depth) {}

  /// The head's rows of another matrix whose rows belong to the queries.
  __device__ head_rows<T> of_queries(const row_array<const T>& all, int depth) const {
    return {all, first_query, queries, head, depth};
  }
  /// Whether the query and the key exist and the mask allows the pair. Positions are counted within the
  /// sequence.
  __device__ bool sees(const attention_problem<T>& p, index_t query, index_t key) const {
    if (query >= queries || key >= keys || (p.causal && key > query + keys - queries)) return false;
    return p.allowed == nullptr || p.allowed[sequence * p.allowed_strides[0] + query * p.allowed_strides[1] +
                                             key * p.allowed_strides[2]] != 0;
  }
  /// Number of keys, counted from the first one, that queries before `end` may see.
  __device__ index_t visible(const attention_problem<T>& p, index_t end) const {
    const index_t last = (end < queries ? end : queries) + keys - queries;
    return !p.causal || last > keys ? keys : last;
  }
};

/// Bits of a tile's weights that dropout keeps, in shared memory. draw_kept explains the order of the bits.
template <int Tile>
struct kept_bits {
  const std::uint32_t* words;
  index_t query, key, keys;

  /// Whether dropout keeps the weight at a row and column of the tile.
  __device__ bool operator()(int row, int column) const {
    const int bit = static_cast<int>(((query + row) * keys + key) % 32) + column;
    return (words[row * kept_words<Tile> + bit / 32] >> (bit % 32) & 1U) != 0;
  }
};

/// Draws the bits of a tile, four random words per thread and step. A call of add_scores, whose barrier makes
/// the bits visible, must follow. Weight (query, key) of a head has position query keys + key in the head's
/// random stream. Word w of row r of `words` has the positions from 32 (((query + r) keys + key) / 32 + w)
/// on.
template <int Tile, class T>
__device__ kept_bits<Tile> draw_kept(const attention_problem<T>& p, const attention_head<T>& head,
                                     index_t query, index_t key, std::uint32_t* words) {
  const kept_bits<Tile> result{words, query, key, head.keys};
  if (!p.dropout.drops()) return result;
  const std::uint64_t number =
      (p.first_sequence + static_cast<std::uint64_t>(head.sequence)) * static_cast<std::uint64_t>(p.heads) +
      static_cast<std::uint64_t>(head.head);
  random_key key_of_head = layer_key(*p.dropout.step, p.dropout.layer);
  key_of_head.stream = substream_of(key_of_head.stream, number);
  constexpr int blocks = 8 * kept_words<Tile>;
  for (int at = block_thread(); at < Tile * blocks; at += attention_threads) {
    const int row = at / blocks, word = at % blocks / 8, in_word = at % 8;
    const auto first = static_cast<std::uint64_t>((query + row) * head.keys + key) / 32;
    const random_block drawn = random_block_at(
        key_of_head, (first + static_cast<std::uint64_t>(word)) * 8 + static_cast<std::uint64_t>(in_word));
    std::uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) {
      const int bit = i / 2 * 16 + 2 * in_word + i % 2;
      bits |= drawn.words[i] < p.dropout.threshold ? 0U : 1U << bit;
    }
    for (int distance = 1; distance < 8; distance *= 2) {
      bits |= __shfl_xor_sync(all_lanes, bits, distance);
    }
    if (in_word == 0) words[row * kept_words<Tile> + word] = bits;
  }
  return result;
}

PUFFERFISH_KERNELS_END
