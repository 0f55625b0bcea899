# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
cmake_minimum_required(VERSION 3.16)
project(consumer LANGUAGES CXX)
add_subdirectory(pufferfish)
add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE pufferfish::pufferfish)
