// A kernel that takes one structure, as a function that Python can call: LAUNCHER(name, (kernel)).
#pragma once

#include <emulator.h>

template <class Arguments>
const char* launch(void (*kernel)(Arguments), unsigned grid, unsigned threads, size_t shared, uint64_t seed,
                   const void* arguments, size_t bytes) {
    static std::string error;
    error = bytes == sizeof(Arguments) ? "" : "arguments have " + std::to_string(bytes) + " bytes, not " +
                                                  std::to_string(sizeof(Arguments));
    if (error.empty()) {
        error = emulator::launch({grid}, threads, shared, seed,
                                 [&] { kernel(*static_cast<const Arguments*>(arguments)); });
    }
    return error.empty() ? nullptr : error.c_str();
}
#define UNWRAP(...) __VA_ARGS__
#define LAUNCHER(name, kernel)                                                                                  \
    extern "C" const char* launch_##name(unsigned grid, unsigned threads, size_t shared, uint64_t seed,         \
                                         const void* arguments, size_t bytes) {                                 \
        return launch(UNWRAP kernel, grid, threads, shared, seed, arguments, bytes);                            \
    }
