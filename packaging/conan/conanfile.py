# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Recipe for Conan 2: `conan create packaging/conan` in a clone makes the package, and test_package compiles a program with it."""
import pathlib
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy


class Pufferfish(ConanFile):
    name = "pufferfish"
    license = "Apache-2.0 WITH LLVM-exception"
    homepage = "https://arxiv.org/abs/2103.03936"
    description = "Low-rank neural-network layers, header-only C++20"
    topics = ("machine-learning", "neural-network", "low-rank", "distributed-training", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"train": [True, False]}  # pufferfish::train, which needs zlib and nlohmann_json
    default_options = {"train": False}
    no_copy_source = True

    @property
    def sources_of_recipe(self):
        return pathlib.Path(self.recipe_folder).parent.parent

    def set_version(self):
        text = (self.sources_of_recipe / "include/pufferfish/core/version.hpp").read_text(encoding="utf-8")
        self.version = re.search(r'PUFFERFISH_VERSION_STRING "([0-9.]+)"', text).group(1)

    def export_sources(self):
        for pattern in ("include/*", "LICENSE"):
            copy(self, pattern, self.sources_of_recipe, self.export_sources_folder)

    def requirements(self):
        if self.options.train:
            self.requires("zlib/[>=1.2.11 <2]")
            self.requires("nlohmann_json/[>=3.11 <4]")

    def validate(self):
        check_min_cppstd(self, 20)

    def package_id(self):
        self.info.settings.clear()

    def package(self):
        copy(self, "LICENSE", self.source_folder, pathlib.Path(self.package_folder) / "licenses")
        copy(self, "include/*", self.source_folder, self.package_folder)

    def package_info(self):
        def header_only(component, target):
            component.set_property("cmake_target_name", target)
            component.bindirs = component.libdirs = []
        library = self.cpp_info.components["pufferfish"]
        header_only(library, "pufferfish::pufferfish")
        if self.settings.os in ("Linux", "FreeBSD"):
            library.system_libs = ["pthread"]
        if self.options.train:
            train = self.cpp_info.components["train"]
            header_only(train, "pufferfish::train")
            train.requires = ["pufferfish", "zlib::zlib", "nlohmann_json::nlohmann_json"]
