// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// What the parts of the emulated device know of each other (cuda.hpp says what it is).

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <mutex>

namespace emulated_device {

using operation = std::function<void()>;

/// One host thread at a time is inside the device. Recursive: an operation may wait for another stream's.
std::recursive_mutex& device_lock();

/// Takes an operation into a stream: executes it now or when the stream is waited for, or records it if the
/// stream is being captured.
cudaError_t submit(cudaStream_t stream, const char* name, operation work);

/// Executes a grid (blocks.cpp), on the calling host thread. `together`: blocks may wait for each other.
void run_grid(const char* name, dim3 blocks, dim3 threads, std::size_t shared_bytes, bool together,
              const operation& thread);

/// Drops the copies that a block's threads have started and not waited for (warp.cpp).
void forget_copies();

/// Prints which kernel, block and thread are at work, if any.
void print_position();

/// There are two of them, of one kind; whose memory is whose is known, and nothing else of it.
inline constexpr int devices = 2;
/// Of the calling thread.
int& current_device();
/// That memory was allocated on.
int device_of(const void* memory);

/// Multiprocessors that the device claims to have, and most shared memory of a block (bytes).
inline constexpr int multiprocessors = 132;
inline constexpr std::size_t most_shared_bytes = 227 * 1024;

// Memory (memory.cpp) ---------------------------------------------------------------------------------------

/// The device's memory may be touched while one of these lives: elsewhere a host's access is a fault, as on a
/// real device.
class access {
 public:
  access();
  ~access();
  access(const access&) = delete;
  access& operator=(const access&) = delete;
};

/// Null where there is no room. Filled with NaNs (0xff).
void* allocate_device(std::size_t bytes);
void* allocate_pinned(std::size_t bytes);
/// False if nothing was allocated at that address. Ends the program if the bytes past its end have changed.
bool free_device(void* memory);
bool free_pinned(void* memory);
void pin(void* memory, std::size_t bytes);
bool unpin(void* memory);

enum class kind { pageable, pinned, device };
/// The kind of the memory of `bytes` bytes. Ends the program if they leave an allocation of the device.
kind kind_of(const void* memory, std::size_t bytes);

/// Whether an address is in device memory; quick where it is far from any.
bool is_device(const void* memory);

std::size_t free_bytes();
std::size_t total_bytes();
/// Ends the program if the bytes past the end of an allocation have changed.
void check_guards();

}  // namespace emulated_device
