// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `communicator`: the operations that the gradient exchange requires of a group of processes, and functions
/// based on them. `self` (distributed/self.hpp) and `mpi::communicator` (distributed/mpi.hpp) satisfy it.
///
/// Rules for every communicator:
/// - A *collective* is called by all ranks, in the same order, with the same lengths, types and roots.
///   Compare digests by `agree` to find out, before data is mixed, whether all ranks are about to make the
///   same calls.
/// - One thread at a time uses a communicator and its requests.
/// - Blocking collectives work in place and return when this rank's memory holds the result.
/// - A started reduction owns the span's memory until `wait()` returned or `done()` was true. Until then the
///   caller must keep it alive, not access it, and not use it in another collective. Any number of reductions
///   may be in flight; a blocking collective may be called meanwhile.
/// - An empty span does nothing (on all ranks, as lengths are equal).
/// - Failures of the underlying library are thrown as backend_error, on the ranks that see them.
///
/// \code
///   self comm;  // or mpi::communicator comm(MPI_COMM_WORLD);
///   agree(comm, "number of classes", 10);  // throws on all ranks if one of them has another number
///   std::vector<float> values(1000, 1.0F);
///   auto sum = comm.start_all_reduce_sum(std::span<float>(values));
///   while (!sum.done()) {
///   }  // work that does not use `values`
///   mean(comm, std::span<float>(values));
/// \endcode

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/config.hpp>
#include <pufferfish/core/error.hpp>
#include <pufferfish/core/hash.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/distributed/rank_groups.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Whether collectives can add and compare elements of type T: float, double and integers of 4 or 8 bytes,
/// not const.
template <class T>
inline constexpr bool is_reducible_v =
    !std::is_const_v<T> && (std::is_same_v<T, float> || std::is_same_v<T, double> ||
                            (std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8)));

/// A handle of a started collective. Move-only.
///   done()  true once the result is in place; each call lets the transfer make progress. Stays true.
///   wait()  returns once the result is in place. Further calls return at once.
/// A moved-from request is done. Destroying an unfinished request, or assigning to it, waits for its end.
template <class R>
concept collective_request = std::movable<R> && !std::copy_constructible<R> && requires(R & request) {
  { request.done() } -> std::same_as<bool>;
  { request.wait() } -> std::same_as<void>;
};

/// A group of processes, numbered 0 .. size() - 1.
///   rank(), size()             number of the calling process; number of processes. Local
///   all_reduce_sum(span<T>)    element i becomes the sum of all ranks' elements i, in place. All ranks get
///                              the same bits (NaNs apart). Rounding may depend on length and number of
///                              ranks.
///   all_reduce_min(span<T>), all_reduce_max(span<T>)  element i becomes the least or largest of all ranks'
///                              elements i; undefined if one is NaN
///   start_all_reduce_sum(span<T>)  starts the sum of all_reduce_sum and returns a collective_request
///   broadcast(span<T>, root)   copies root's elements to all ranks, T trivially copyable
///   broadcast_bytes(span<std::byte>, root)  copies root's bytes to all ranks
///   all_gather(value)          std::vector<T> of all ranks' values, by rank; T trivially copyable, <= 4 KiB
///   barrier()                  returns when all ranks have called it
/// Spans have dynamic extent; T as is_reducible_v says. A root outside the group throws value_error.
template <class C>
concept communicator = requires(C& comm, const C& observer, std::span<float> floats,
                                std::span<double> doubles, std::span<std::int64_t> integers,
                                std::span<std::uint64_t> words, std::span<std::byte> bytes, int root,
                                std::uint64_t word) {
  { observer.rank() } -> std::same_as<int>;
  { observer.size() } -> std::same_as<int>;
  comm.all_reduce_sum(floats);
  comm.all_reduce_sum(doubles);
  comm.all_reduce_sum(integers);
  { comm.start_all_reduce_sum(floats) } -> collective_request;
  { comm.start_all_reduce_sum(doubles) } -> collective_request;
  comm.all_reduce_min(integers);
  comm.all_reduce_max(integers);
  comm.all_reduce_max(floats);
  comm.all_reduce_min(words);
  comm.all_reduce_max(words);
  comm.broadcast(floats, root);
  comm.broadcast(words, root);
  comm.broadcast_bytes(bytes, root);
  { comm.all_gather(word) } -> std::same_as<std::vector<std::uint64_t>>;
  comm.barrier();
};

namespace detail {

template <class C>
constexpr void check_communicator() {
  static_assert(
      communicator<C>,
      "pufferfish: this argument must be a communicator: pufferfish::self, pufferfish::mpi::communicator "
      "or a class with the members listed in <pufferfish/distributed/communicator.hpp>");
}

template <class T>
constexpr void check_reducible() {
  static_assert(
      is_reducible_v<T>,
      "pufferfish: collectives add and compare float, double and integers of 4 or 8 bytes, in memory "
      "that is not const");
}

template <class T>
constexpr void check_gatherable() {
  static_assert(
      std::is_trivially_copyable_v<T> && !std::is_same_v<T, bool> && sizeof(T) <= 4096,
      "pufferfish: all_gather takes trivially copyable records of at most 4096 bytes (and not bool)");
}

template <class T>
constexpr void check_broadcastable() {
  static_assert(std::is_trivially_copyable_v<T> && !std::is_const_v<T>,
                "pufferfish: broadcast copies bytes: the elements must be trivially copyable and not const");
}

/// Throws value_error, naming `where` and both numbers, unless 0 <= root < size.
inline void check_root(const char* where, int root, int size) {
  if (root < 0 || root >= size) {
    PUFFERFISH_THROW(value_error(std::string(where) + ": root " + std::to_string(root) +
                                 " is outside the group of " + detail::counted(size, "rank")));
  }
}

/// Returns rank `root`'s `text` on all ranks; the other ranks' texts are ignored. Collective.
template <class C>
std::string broadcast_text(C& comm, const std::string& text, int root) {
  std::array<std::uint64_t, 1> length{text.size()};
  comm.broadcast(std::span<std::uint64_t>(length), root);
  std::string result = comm.rank() == root ? text : std::string(static_cast<std::size_t>(length[0]), '\0');
  comm.broadcast(std::span<char>(result.data(), result.size()), root);
  return result;
}

/// Keeps `memory` until the process ends, since MPI may still read or write it after a wait has timed out.
inline void keep_for_good(std::shared_ptr<const void> memory) {
  static std::mutex adding;
  // The list is not destroyed at the end of the program, when messages can still arrive.
  static auto& kept = *new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard hold(adding);
  kept.push_back(std::move(memory));
}

/// Whether a wait of the group has timed out. Memory of transfers under way must then not be reused.
template <class C>
bool gave_up(const C& comm) {
  if constexpr (requires { comm.broken(); }) return comm.broken();
  return false;
}

/// Guard for `memory` that messages use: at the guard's end it is kept for good if a wait has timed out.
template <class C>
struct kept_after_timeout {
  const C& comm;
  std::shared_ptr<const void> memory;
  kept_after_timeout(const C& of, std::shared_ptr<const void> kept) : comm(of), memory(std::move(kept)) {}
  kept_after_timeout(const kept_after_timeout&) = delete;
  kept_after_timeout& operator=(const kept_after_timeout&) = delete;
  ~kept_after_timeout() {
    if (gave_up(comm)) keep_for_good(std::move(memory));
  }
};

/// Throws timeout_error if a wait has timed out: to be called before memory of transfers is changed.
template <class C>
void check_not_given_up(const C& comm) {
  if (gave_up(comm)) PUFFERFISH_THROW(timeout_error("the communicator is of no use after a timeout"));
}

/// Whether the program uses this rank's state after a timeout, so that parameters must always be those of a
/// whole step: comm.may_lose_ranks() if the communicator has this member, else whether comm.timeout() is
/// above 0, else false.
template <class C>
bool may_lose_ranks(const C& comm) {
  if constexpr (requires { comm.may_lose_ranks(); }) {
    return comm.may_lose_ranks();
  } else if constexpr (requires { comm.timeout(); }) {
    return comm.timeout() > 0.0;
  } else {
    return false;
  }
}

/// An exception thrown by local work, and its text. `failure` is null if there was none.
struct local_failure {
  std::exception_ptr failure;
  std::string text;
};

/// Calls work() and returns the exception that it throws, if any.
template <class Work>
local_failure failure_of(Work&& work) {
  try {
    work();
  } catch (const std::exception& e) {
    return {std::current_exception(), e.what()};
  } catch (...) {
    return {std::current_exception(), "an exception that is not a std::exception"};
  }
  return {};
}

/// Returns if no rank has a failure. Otherwise throws on all ranks: a rank with a failure rethrows it, the
/// others throw value_error with `name`, the first such rank and its text. Collective.
template <class C>
void agree_on_success(C& comm, std::string_view name, const local_failure& mine) {
  check_communicator<C>();
  const std::vector<std::uint64_t> failed = comm.all_gather(static_cast<std::uint64_t>(mine.failure ? 1 : 0));
  const auto first = std::find(failed.begin(), failed.end(), std::uint64_t{1});
  if (first == failed.end()) return;
  const int rank = static_cast<int>(first - failed.begin());
  const std::string text = broadcast_text(comm, mine.text, rank);
  if (mine.failure) std::rethrow_exception(mine.failure);
  PUFFERFISH_THROW(value_error(std::string(name) + ": given up on all ranks, since rank " +
                               std::to_string(rank) + " failed: " + text));
}

/// Calls work() on every rank and returns its result if it has succeeded on all of them. If it throws on one
/// rank, all ranks throw as agree_on_success says, so that no rank waits in a later collective for one that
/// has left. `work` itself must not communicate. Collective: eight bytes a rank.
template <class C, class Work>
auto all_or_none(C& comm, std::string_view name, Work&& work) {
  using result = std::invoke_result_t<Work&>;
  if constexpr (std::is_void_v<result>) {
    agree_on_success(comm, name, failure_of(work));
  } else {
    std::optional<result> made;
    const local_failure mine = failure_of([&] { made.emplace(work()); });
    agree_on_success(comm, name, mine);
    return result(std::move(*made));
  }
}

}  // namespace detail

/// Replaces element i by the mean of all ranks' elements i, in place: the sum times 1 / p rounded to T, which
/// may differ from sum / p in the last place. float or double, the same bits on all ranks. A sum that
/// overflows gives an infinity. With one rank the values are unchanged. Collective and blocking. Throws the
/// errors of the communicator's all_reduce_sum.
template <class C, class T>
void mean(C& comm, std::span<T> values) {
  detail::check_communicator<C>();
  static_assert(std::is_floating_point_v<T>, "pufferfish::mean: takes a span of float or double");
  comm.all_reduce_sum(values);
  if (comm.size() == 1) return;
  const T factor = T(1) / static_cast<T>(comm.size());
  for (T& value : values) value *= factor;
}

/// Compares one number of every rank. Returns if all are equal. Otherwise throws state_error on *all* ranks,
/// so that no rank continues alone. The text lists the values and their ranks: 'network differs between
/// ranks: rank 2 has digest 0x...; ranks 0, 1, 3 have digest 0x...'. `name` is what is compared. Collective.
/// Cost: one all_gather of 8 bytes per rank. The text lists at most four values, those of the smallest groups
/// of ranks first.
template <class C>
void agree(C& comm, std::string_view name, std::uint64_t digest) {
  detail::check_communicator<C>();
  const std::vector<std::uint64_t> digests = comm.all_gather(digest);
  const std::vector<detail::rank_group> groups = detail::group_ranks(digests);
  if (groups.size() < 2) return;
  const auto describe = [](const detail::rank_group& group, std::size_t) {
    return std::string("digest ").append(detail::hexadecimal(group.digest));
  };
  PUFFERFISH_THROW(state_error(std::string(name) +
                               " differs between ranks: " + detail::describe_groups(groups, describe)));
}

/// Checks that all ranks have equal texts: a description in lines (one per parameter, say "conv1.weight float
/// [16 x 3 x 3 x 3]"), of any length on each rank. Throws state_error on all ranks if texts differ, quoting
/// the first line that differs: 'network differs between ranks at line 7: rank 2 has "stage2.conv.down float
/// [24 x 3 x 3 x 96]"; ranks 0, 1, 3 have "..."'. Cost: one all_gather of 8 bytes per rank if all texts are
/// equal, else also the broadcast of at most four of them. The texts are compared by 64-bit digests
/// (core/hash.hpp). Collective.
template <class C>
void agree_on_lines(C& comm, std::string_view name, const std::string& lines) {
  detail::check_communicator<C>();
  const std::vector<std::uint64_t> digests = comm.all_gather(digest(std::string_view(lines)));
  const std::vector<detail::rank_group> groups = detail::group_ranks(digests);
  if (groups.size() < 2) return;
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < std::min(groups.size(), detail::listed_groups); ++i) {
    texts.push_back(detail::broadcast_text(comm, lines, groups[i].ranks.front()));
  }
  const std::size_t line = detail::first_difference(texts);
  const auto describe = [&](const detail::rank_group&, std::size_t i) {
    return detail::line_of(texts[i], line);
  };
  PUFFERFISH_THROW(state_error(std::string(name) + " differs between ranks at line " +
                               std::to_string(line + 1) + ": " + detail::describe_groups(groups, describe)));
}

PUFFERFISH_NAMESPACE_END
