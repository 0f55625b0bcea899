// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the part of an attention that one block computes: a tile of a run, its head's rows, which pairs
/// of queries and keys count, and which weights dropout keeps. A block has 128 threads.

#include <pufferfish/gpu/kernels/attention/attention.hpp>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

inline constexpr int attention_threads = 128;
/// Columns of the result that a block computes.
inline constexpr int result_columns = 64;
/// Words of dropout bits per query: a tile's keys may begin anywhere in a word.
template <int Tile>
inline constexpr int kept_words = Tile / 32 + 1;
/// Dropout bits of a tile, in shared memory.
template <int Tile>
using kept_memory = std::uint32_t[static_cast<std::size_t>(Tile) * (static_cast<std::size_t>(Tile) / 32 + 1)];

/// Four neighbouring elements that are read by one access.
template <class T>
struct alignas(4 * sizeof(T)) four_of {
  T values[4];
};

/// The part of a matrix that belongs to one sequence (rows) and one head (columns).
template <class T>
struct head_rows {
  const T* data;
  index_t stride;
  int rows, columns;
  bool vectors;  ///< whether rows are aligned to four elements

  /// Rows first .. first + count - 1 of `all`, columns head depth .. (head + 1) depth - 1.
  __device__ head_rows(const row_array<const T>& all, index_t first, int count, int head, int depth)
      : data(all.row(first) + static_cast<index_t>(head) * depth),
        stride(all.stride),
        rows(count),
        columns(depth),
        vectors(reinterpret_cast<std::uintptr_t>(data) % sizeof(four_of<T>) == 0 && stride % 4 == 0) {}

  /// The columns first .. first + count - 1, as far as they exist.
  __device__ head_rows part(int first, int count) const {
    head_rows result(*this);
    result.data += first;
    result.columns = columns - first < count ? columns - first : count;
    return result;
  }
  /// Four neighbouring elements of a row from `column` on; zeros outside of the matrix.
  __device__ vector<float> four(int row, int column) const {
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

/// The matrices of a block: rows of its tile, and rows over which it walks.
template <class T>
struct attention_operands {
  head_rows<T> left[2], right[2];
};

/// A tile of a run: number of the sequence, and first row of the tile in the sequence. Sequence -1: no tile.
struct run_tile {
  index_t sequence;
  int first;
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
      return {base + owner, static_cast<int>(number - begin) * Tile};
    }
    number -= __shfl_sync(all_lanes, end, warp_threads - 1);
  }
  return {-1, 0};
}

/// Writes zeros to the rows of no run among rows Tile number .. Tile number + Tile - 1 of a matrix with
/// `rows` rows: to the columns first .. first + count - 1. All threads of a block must call this function.
template <int Tile, class T>
__device__ inline void clear_gaps(const run_arrays& runs, index_t rows, index_t number,
                                  const row_array<T>& to, index_t first, int count) {
  static_assert(Tile <= 64);
  const index_t begin = number * Tile;
  if (begin >= rows) return;
  const int lane = block_thread() % warp_threads;
  const int inside = rows - begin < Tile ? static_cast<int>(rows - begin) : Tile;
  // Bit i: row begin + i belongs to a run.
  std::uint64_t taken = 0;
  for (index_t s = lane; s < runs.sequences; s += warp_threads) {
    const index_t from = runs.first[s] - begin, end = from + runs.count[s];
    if (end <= 0 || from >= inside || runs.count[s] == 0) continue;
    const std::uint64_t below = from <= 0 ? 0 : (std::uint64_t{1} << from) - 1;
    taken |= (end >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << end) - 1) & ~below;
  }
  taken = warp_reduce(taken, [](std::uint64_t a, std::uint64_t b) { return a | b; });
  for (int i = block_thread() / warp_threads; i < inside; i += attention_threads / warp_threads) {
    if ((taken >> i & 1U) != 0) continue;
    for (int c = lane; c < count; c += warp_threads) to.row(begin + i)[first + c] = T(0.0F);
  }
}

/// clear_gaps for the columns of a block: 64 blockIdx.z .. of the `depth` columns of head blockIdx.y.
template <int Tile, class T>
__device__ inline void clear_result_gaps(const run_arrays& runs, index_t rows, index_t number,
                                         const row_array<T>& to, int depth) {
  const int column = static_cast<int>(blockIdx.z) * result_columns;
  const int count = depth - column < result_columns ? depth - column : result_columns;
  clear_gaps<Tile>(runs, rows, number, to, static_cast<index_t>(blockIdx.y) * depth + column, count);
}

/// One head of one sequence: its rows of queries, keys and values.
template <class T>
struct attention_head {
  index_t sequence, first_query, first_key;
  int queries, keys, head;
  head_rows<T> q, k, v;

  /// Head `number` of sequence s.
  __device__ attention_head(const attention_problem<T>& p, index_t s, int number)
      : sequence(s),
        first_query(p.queries.first[s]),
        first_key(p.keys.first[s]),
        queries(static_cast<int>(p.queries.count[s])),
        keys(static_cast<int>(p.keys.count[s])),
        head(number),
        q(p.q, first_query, queries, number, p.depth),
        k(p.k, first_key, keys, number, p.depth),
        v(p.v, first_key, keys, number, p.value_depth) {}

  /// The head's rows of another matrix whose rows belong to the queries.
  __device__ head_rows<T> of_queries(const row_array<const T>& all, int depth) const {
    return {all, first_query, queries, head, depth};
  }
  /// Number of keys, counted from the first one, that queries before `end` may see.
  __device__ int visible(const attention_problem<T>& p, int end) const {
    return !p.causal || end >= queries ? keys : keys - (queries - end);
  }
};

/// Which pairs of a tile count, by positions within the tile.
template <class T>
struct tile_mask {
  int queries, keys;  ///< numbers of queries and keys of the tile that exist
  int diagonal;       ///< query r sees the keys up to r + diagonal
  bool whole;         ///< every query of the tile that exists sees Edge keys
  const unsigned char* allowed;
  index_t query_stride, key_stride;

  /// The tile of Edge queries from `query` on and Edge keys from `key` on, counted within the sequence.
  template <int Edge>
  static __device__ tile_mask of(const attention_problem<T>& p, const attention_head<T>& head, int query,
                                 int key) {
    const auto within = [](int count) { return count < -Edge ? -Edge : count < Edge ? count : Edge; };
    tile_mask result;
    result.queries = within(head.queries - query);
    result.keys = within(head.keys - key);
    result.diagonal = p.causal ? within(query - head.queries + head.keys - key) : Edge;
    result.query_stride = p.allowed_strides[1];
    result.key_stride = p.allowed_strides[2];
    result.allowed = p.allowed == nullptr ? nullptr
                                          : p.allowed + head.sequence * p.allowed_strides[0] +
                                                query * result.query_stride + key * result.key_stride;
    result.whole = p.allowed == nullptr && result.keys == Edge && result.diagonal >= Edge - 1;
    return result;
  }
  /// Whether the query and the key exist, and the key is not beyond the last one that the query sees.
  __device__ bool in_reach(int query, int key) const {
    return query < queries && key < keys && key <= query + diagonal;
  }
  /// Whether the pair is in reach and allowed. The mask has bytes.
  __device__ bool operator()(int query, int key) const {
    return in_reach(query, key) && allowed[query * query_stride + key * key_stride] != 0;
  }
};

/// Bits of a tile's weights that dropout keeps, in shared memory. draw_kept explains the order of the bits.
template <int Tile>
struct kept_bits {
  const std::uint32_t* words;
  std::uint32_t first;  ///< position of the tile's first weight, modulo 2^32
  std::uint32_t keys;   ///< positions from a query to the next

  /// Whether dropout keeps the weight of a query and a key of the tile.
  __device__ bool operator()(int query, int key) const {
    const int bit = static_cast<int>((first + static_cast<std::uint32_t>(query) * keys) % 32) + key;
    return (words[query * kept_words<Tile> + bit / 32] >> (bit % 32) & 1U) != 0;
  }
};

/// Draws the bits of a tile, four random words per thread and step. A barrier must follow. Weight (query,
/// key) of a head has position query keys + key in the head's random stream. Word w of row r of `words` has
/// the positions from 32 (((query + r) keys + key) / 32 + w) on.
template <int Tile, class T>
__device__ kept_bits<Tile> draw_kept(const attention_problem<T>& p, const attention_head<T>& head, int query,
                                     int key, std::uint32_t* words) {
  const auto keys = static_cast<std::uint32_t>(head.keys);
  const kept_bits<Tile> result{
      words, static_cast<std::uint32_t>(query) * keys + static_cast<std::uint32_t>(key), keys};
  if (!p.dropout.drops()) return result;
  const std::uint64_t number =
      (p.first_sequence + static_cast<std::uint64_t>(head.sequence)) * static_cast<std::uint64_t>(p.heads) +
      static_cast<std::uint64_t>(head.head);
  random_key key_of_head = layer_key(*p.dropout.step, p.dropout.layer);
  key_of_head.stream = substream_of(key_of_head.stream, number);
  constexpr int blocks = 8 * kept_words<Tile>;
  for (int at = block_thread(); at < Tile * blocks; at += attention_threads) {
    const int row = at / blocks, word = at % blocks / 8, in_word = at % 8;
    const auto first = static_cast<std::uint64_t>(index_t{query + row} * head.keys + key) / 32;
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
