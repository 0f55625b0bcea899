# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which header declares what the library uses of the standard library and of the hosts of its adapters."""
import re
import sys
import pathlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))
import sources  # noqa: E402  (its folder is no package)

# Names that several headers declare (std::size, std::get, std::swap of a container) are not here, or as their main one.
STANDARD = {
    "algorithm": "adjacent_find all_of any_of binary_search clamp copy copy_if copy_n count count_if equal fill fill_n find "
                 "find_if lower_bound max max_element min min_element none_of nth_element partition_point reverse rotate sort "
                 "stable_sort swap_ranges transform upper_bound",
    "array": "array",
    "atomic": "atomic memory_order_acq_rel memory_order_acquire memory_order_relaxed memory_order_release",
    "bit": "bit_cast bit_ceil countr_zero endian popcount",
    "charconv": "chars_format from_chars to_chars",
    "chrono": "chrono milli",
    "cmath": "ceil copysign cos erfc exp floor frexp hypot isfinite isinf isnan ldexp log lround pow round sin sqrt tanh",
    "concepts": "convertible_to copy_constructible derived_from floating_point integral invocable movable same_as",
    "cstddef": "byte max_align_t ptrdiff_t size_t",
    "cstdint": "int16_t int32_t int64_t int8_t uint16_t uint32_t uint64_t uint8_t uintptr_t",
    "cstdio": "fflush fprintf printf snprintf",
    "cstdlib": "abort getenv strtod",
    "cstring": "memcmp memcpy memset strlen",
    "ctime": "timespec",
    "exception": "current_exception exception_ptr rethrow_exception terminate uncaught_exceptions",
    "functional": "equal_to function greater less",
    "initializer_list": "initializer_list",
    "istream": "istream",
    "limits": "numeric_limits",
    "map": "map",
    "memory": "dynamic_pointer_cast make_shared make_unique shared_ptr unique_ptr",
    "mutex": "lock_guard mutex unique_lock",
    "new": "align_val_t",
    "numbers": "numbers",
    "numeric": "accumulate gcd iota lcm",
    "optional": "nullopt optional",
    "ostream": "ostream",
    "queue": "priority_queue",
    "set": "set",
    "span": "as_bytes as_writable_bytes span",
    "sstream": "istringstream ostringstream",
    "stdexcept": "runtime_error",
    "string": "getline stol string to_string u32string",
    "string_view": "string_view u32string_view",
    "system_error": "errc generic_category",
    "thread": "this_thread thread",
    "tuple": "tuple",
    "type_traits": "conditional_t enable_if_t is_base_of_v is_const_v is_constructible_v is_floating_point_v is_integral_v "
                   "is_invocable_v is_lvalue_reference_v is_same_v is_signed_v is_trivially_copyable_v is_unsigned_v "
                   "make_signed_t remove_const_t remove_cv_t remove_cvref_t remove_pointer_t remove_reference_t "
                   "type_identity_t",
    "typeindex": "type_index",
    "unordered_map": "unordered_map",
    "utility": "as_const declval exchange forward index_sequence make_index_sequence move pair swap",
    "variant": "get_if holds_alternative variant visit",
    "vector": "vector",
}
HEADER_OF = {name: header for header, names in STANDARD.items() for name in names.split()}
# What a host's headers all come with.
HOSTS = {"torch": "torch/torch.h", "dlib": "dlib/dnn.h"}

NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
NAME = re.compile(r"\bstd::(\w+)")


def undeclared(path, root):
    """{header: names} that a header of ours uses and that neither it nor a header of ours that it includes includes."""
    used = set()
    for part in [path, *((path.parent / name).resolve() for name, quoted in sources.includes(path) if quoted)]:
        code = NO_CODE.sub("", part.read_text(encoding="utf-8"))
        used |= {(HEADER_OF[name], f"std::{name}") for name in NAME.findall(code) if name in HEADER_OF}
        used |= {(HOSTS[host], f"{host}::") for host in HOSTS if re.search(rf"(?<!\w){host}::", code)}
    included = sources.foreign_includes(path, root)
    missing = {}
    for header, name in sorted(used):
        host = header.split("/")[0] + "/"
        if header not in included and not ("/" in header and any(other.startswith(host) for other in included)):
            missing.setdefault(header, []).append(name)
    return missing
