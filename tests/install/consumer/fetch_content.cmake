# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
cmake_minimum_required(VERSION 3.16)
project(consumer LANGUAGES CXX)
include(FetchContent)
FetchContent_Declare(pufferfish GIT_REPOSITORY ${PUFFERFISH_ADDRESS} GIT_TAG main)
FetchContent_MakeAvailable(pufferfish)
add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE pufferfish::pufferfish)
