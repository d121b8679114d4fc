// What the drivers have in common: a check that names its line, and findings planted to show that a sanitizer bites.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                           \
        }                                                                           \
    } while (false)

// "race", "overflow" (of memory) or "undefined" (of a signed number): true where one of them was asked for and done.
inline bool planted(int count, char** words) {
    if (count < 3 || std::strcmp(words[1], "--plant") != 0) return false;
    volatile int value = std::numeric_limits<int>::max() - 1;
    if (std::strcmp(words[2], "race") == 0) {
        int shared = 0;
        std::thread other([&] { shared += value; });
        shared += 1;
        other.join();
        value = shared;
    } else if (std::strcmp(words[2], "overflow") == 0) {
        const std::unique_ptr<char[]> bytes(new char[8]);
        volatile size_t beyond = 8;
        bytes[beyond] = 1;
    } else {
        volatile int two = 2;
        value = value + two;
    }
    return true;
}
