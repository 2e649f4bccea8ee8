#include <emulator.h>

#include <csignal>
#include <immintrin.h>
#include <sys/mman.h>

namespace emulator {

Block* block;
Fiber* current;
dim3 block_index, block_size, grid_size;

namespace {

constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t CANARY_BYTES = 256;

void* scheduler_stack_pointer;
const std::function<void()>* kernel_body;
std::string failure;
uint64_t random_state;

/// A number below `end`.
size_t draw(size_t end) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state >> 32) * end >> 32;
}

/// Saves this context's registers on its stack and its stack pointer in `save`, and goes on where `load` left off.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

void yield() { emulator_switch(&current->stack_pointer, scheduler_stack_pointer); }

void begin() {
    (*kernel_body)();
    if (!current->copies.empty()) fail("a thread ended with asynchronous copies that it did not wait for");
    current->done = true;
    yield();
}

void prepare(Fiber& fiber) {
    void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(begin);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.stack_pointer = top;
}

std::string where() {
    return "block " + std::to_string(block_index.x) + ", thread " + std::to_string(current->index) + ": ";
}

}  // namespace

void fail(const std::string& message) {
    failure = where() + message;
    yield();
    std::abort();
}

namespace {

/// Lets others run until the barrier is complete.
void wait_at(Barrier& barrier) {
    barrier.waiting.push_back(current->index);
    yield();
}

void complete(Barrier& barrier) {
    barrier.arrived = 0;
    block->ready.insert(block->ready.end(), barrier.waiting.begin(), barrier.waiting.end());
    barrier.waiting.clear();
}

}  // namespace

void block_barrier() {
    if (++block->barrier.arrived == block->alive) {
        complete(block->barrier);
    } else {
        wait_at(block->barrier);
    }
    ++current->block_phase;
    ++current->warp_phase;
}

void warp_barrier(unsigned mask) {
    meet("__syncwarp", mask, nullptr, 0);
    if (mask == ~0u) ++current->warp_phase;
}

void touch(const void* at, size_t bytes, bool writes) {
    const int self = current->index, warp = self / LANES, block_phase = current->block_phase, warp_phase = current->warp_phase;
    const auto first = static_cast<size_t>(static_cast<const unsigned char*>(at) - block->shared);
    for (size_t byte = first; byte < first + bytes; ++byte) {
        Touched& touched = block->touched[byte];
        const bool written = touched.writer != self && (touched.writer / LANES == warp ? touched.write_warp_phase == warp_phase
                                                                                       : touched.write_block_phase == block_phase);
        const bool read = touched.read_block_phase == block_phase &&
                          (touched.reading_warp != warp || (touched.reader != self && touched.read_warp_phase == warp_phase));
        if (written || (writes && read)) {
            fail("byte " + std::to_string(byte) + " of shared memory is " + (writes ? "written" : "read") +
                 " with no barrier behind " +
                 (written ? "what thread " + std::to_string(touched.writer) + " wrote" : "those that read it"));
        }
        if (writes) {
            touched = {self, block_phase, warp_phase};
        } else if (touched.read_block_phase != block_phase) {
            touched.reading_warp = warp, touched.reader = self;
        } else if (touched.reading_warp != warp) {
            touched.reading_warp = Touched::SEVERAL;
        } else if (touched.read_warp_phase != warp_phase) {
            touched.reader = self;
        } else if (touched.reader != self) {
            touched.reader = Touched::SEVERAL;
        }
        if (!writes) touched.read_block_phase = block_phase, touched.read_warp_phase = warp_phase;
    }
}

void wrote_globally() {
    current->wrote = current->block_phase;
    current->wrote_since = true;
}

void fence() {
    current->fenced = current->block_phase;
    current->wrote_since = false;
}

void publish() {
    for (const Fiber& fiber : block->fibers) {
        if (&fiber == current ? fiber.wrote_since : fiber.wrote >= current->fenced) {
            fail("an atomic operation publishes what thread " + std::to_string(fiber.index) +
                 " wrote, with no barrier and fence between");
        }
    }
}

const Offer* meet(const char* name, unsigned mask, const void* data, size_t bytes, void (*finish)(Offer*), int line) {
    const int lane = current->index % LANES;
    const unsigned self = 1u << lane;
    Warp& warp = block->warps[current->index / LANES];
    if (!(mask & self)) fail(std::string(name) + ": the lane is not in its own mask");
    if (current->last != nullptr) current->last->unread &= ~self;
    Meeting* meeting = nullptr;
    Meeting* unused = nullptr;
    for (const auto& other : warp.meetings) {
        if (!other->arrived) {
            if (!other->unread) unused = other.get();
        } else if (other->mask == mask && other->line == line && (other->name == name || !std::strcmp(other->name, name))) {
            meeting = other.get();
        } else if ((other->mask & self) && (other->arrived & mask)) {
            // Each would wait for the other for ever.
            fail(std::string(name) + " meets " + other->name + " of lane " + std::to_string(__builtin_ctz(other->arrived & mask)));
        }
    }
    if (meeting == nullptr) {
        if (unused == nullptr) {
            warp.meetings.push_back(std::make_unique<Meeting>());
            unused = warp.meetings.back().get();
        }
        meeting = unused;
        meeting->name = name;
        meeting->line = line;
        meeting->mask = mask;
    }
    if (bytes) std::memcpy(meeting->offers[lane].data, data, bytes);
    current->last = meeting;
    meeting->arrived |= self;
    if (meeting->arrived == mask) {
        if (finish != nullptr) finish(meeting->offers);
        meeting->arrived = 0;
        meeting->unread = mask;
        complete(meeting->barrier);
    } else {
        wait_at(meeting->barrier);
    }
    return meeting->offers;
}

namespace {

/// What the compiler says of a place in the sources, before whatever else it says of it.
struct Place {
    const char* file;
    uint32_t line, column;
};

/// Fails for what a GPU does otherwise than x86.
[[noreturn]] void fail_at(const Place* place, const char* what) {
    fail(std::string(place->file) + ":" + std::to_string(place->line) + ": " + what);
}

}  // namespace

// What code calls that is compiled with -fsanitize. A GPU faults where an address is not aligned, takes shifts by 32 and more
// for shifts by 32, and makes of a number that is too large the largest integer.
extern "C" void __ubsan_handle_type_mismatch_v1(const Place* place, const void*) { fail_at(place, "an address is not aligned"); }
extern "C" void __ubsan_handle_shift_out_of_bounds(const Place* place, const void*, const void*) { fail_at(place, "a shift is too far"); }
extern "C" void __ubsan_handle_float_cast_overflow(const Place* place, const void*) {
    fail_at(place, "a number becomes an integer that it does not fit");
}

void check_row(const char* name, const void* row, size_t bytes) {
    const auto at = reinterpret_cast<uintptr_t>(row), start = reinterpret_cast<uintptr_t>(block->shared);
    if (at % bytes) fail(std::string(name) + ": not aligned to " + std::to_string(bytes) + " bytes");
    if (at < start || at + bytes > start + block->shared_bytes) {
        fail(std::string(name) + ": byte " + std::to_string(static_cast<int64_t>(at - start)) + " is outside the " +
             std::to_string(block->shared_bytes) + " of shared memory");
    }
}

void copy_async(void* target, const void* source, size_t bytes, bool valid) {
    check_row("cp.async", target, bytes);
    if (valid && reinterpret_cast<uintptr_t>(source) % bytes) fail("cp.async: not aligned to " + std::to_string(bytes) + " bytes");
    touch(target, bytes, true);
    std::memset(target, POISON, bytes);
    current->copies.push_back({static_cast<unsigned char*>(target), static_cast<const unsigned char*>(source), bytes, valid, current->group});
}

void copy_commit() { ++current->group; }

void copy_wait(int pending) {
    auto& copies = current->copies;
    size_t kept = 0;
    for (const Copy& copy : copies) {
        if (copy.group >= current->group - pending) {
            copies[kept++] = copy;
            continue;
        }
        touch(copy.target, copy.bytes, true);
        if (copy.valid) {
            std::memcpy(copy.target, copy.source, copy.bytes);
        } else {
            std::memset(copy.target, 0, copy.bytes);
        }
    }
    copies.resize(kept);
}

namespace {

using Doubles [[gnu::vector_size(64)]] = double;
using Words [[gnu::vector_size(64)]] = int64_t;
using Floats [[gnu::vector_size(32)]] = float;
using Integers [[gnu::vector_size(32)]] = int32_t;

/// sums + the products of 8 elements of a row of A with 8 rows of B, side by side.
[[gnu::target_clones("arch=x86-64-v3", "default"), gnu::no_sanitize("float-cast-overflow")]] void add_eight(
    float (&sums)[8], const double* a, const double (*b)[8]) {
    // Without signs the bits of numbers are in their order, infinity behind them and NaN last.
    constexpr int64_t SIZE = INT64_MAX, INFINITE = 0x7ffll << 52;
    Floats before;
    std::memcpy(&before, sums, sizeof before);
    Doubles addends[9] = {__builtin_convertvector(before, Doubles)}, plain = addends[0];
    Words largest = (Words)plain & SIZE;
    for (int k = 0; k < 8; ++k) {
        Doubles row;
        std::memcpy(&row, b[k], sizeof row);
        const Doubles product = addends[k + 1] = a[k] * row;
        plain += product;
        const Words size = (Words)product & SIZE;
        largest = size > largest ? size : largest;
    }
    const Words exponent = (largest >> 52) - 24;
    const Doubles unit = (Doubles)(exponent << 52), per_unit = (Doubles)((2046 - exponent) << 52);
    // Below 2^25 each. Where one is infinite or NaN they are not used.
    Integers units = {};
    for (const Doubles& addend : addends) units += __builtin_convertvector(addend * per_unit, Integers);
    const Doubles all = __builtin_convertvector(units, Doubles) * unit;
    const Floats near = __builtin_convertvector(all, Floats);
    const Words size = (Words)__builtin_convertvector(near, Doubles) & SIZE;
    // Towards 0: where it is not, one less, which is what true is.
    const Words farther = (size > ((Words)all & SIZE)) & (size < INFINITE);
    const Floats cut = (Floats)((Integers)near + __builtin_convertvector(farther, Integers));
    const Integers as_it_is = __builtin_convertvector((largest == 0) | (largest >= INFINITE), Integers);
    const Floats after = as_it_is ? __builtin_convertvector(plain, Floats) : cut;
    std::memcpy(sums, &after, sizeof after);
}

}  // namespace

void add_products(float (&sums)[16][8], const double (&a)[16][16], const double (&b)[16][8]) {
    for (int i = 0; i < 16; ++i) {
        for (int k = 0; k < 16; k += 8) add_eight(sums[i], a[i] + k, b + k);
    }
}

namespace {

/// Who waits where, after a deadlock.
std::string waiting() {
    std::string text;
    if (block->barrier.arrived) text += "; " + std::to_string(block->barrier.arrived) + " at __syncthreads";
    for (size_t i = 0; i < block->warps.size(); ++i) {
        for (const auto& meeting : block->warps[i].meetings) {
            if (!meeting->arrived) continue;
            char part[160];
            std::snprintf(part, sizeof part, "; in warp %zu lanes %08x at %.40s for lanes %08x", i, meeting->arrived,
                          meeting->name, meeting->mask & ~meeting->arrived);
            text += part;
        }
    }
    return text;
}

/// Which of those that may run is next: any. For some hundred turns one warp is ahead of the others, as far as it gets without them.
size_t choose(const std::vector<int>& ready, unsigned turn) {
    static int ahead = 0;
    if (turn % 512 == 0) ahead = static_cast<int>(draw(block->warps.size()));
    size_t at = draw(ready.size());
    for (int tries = 0; tries < 8 && ready[at] / LANES != ahead; ++tries) at = draw(ready.size());
    return at;
}

/// Memory that the system gives as it is touched, all zeros.
template <class T>
struct Pages {
    size_t bytes;
    T* start;

    explicit Pages(size_t count)
        : bytes(count * sizeof(T)),
          start(static_cast<T*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {}
    Pages(const Pages&) = delete;
    ~Pages() { munmap(start, bytes); }
};

/// What the blocks of a launch use one after the other: the system takes longer to give it than many blocks to run.
struct Room {
    size_t shared_bytes;
    // Of the allocator, which tells AddressSanitizer where it ends.
    unsigned char* shared;
    Pages<Touched> touched;
    Pages<unsigned char> stacks;
    /// Larger than the phases of all blocks before, so that what they touched is of no account.
    int first_phase = 1;

    Room(unsigned threads, size_t bytes)
        : shared_bytes(bytes),
          shared(static_cast<unsigned char*>(std::aligned_alloc(128, (shared_bytes + CANARY_BYTES + 127) / 128 * 128))),
          touched(std::max<size_t>(bytes, 1)),
          stacks(STACK_BYTES * threads) {}
    Room(const Room&) = delete;
    ~Room() { std::free(shared); }
};

void run_block(unsigned threads, Room& room) {
    Block now;
    block = &now;
    const size_t shared_bytes = now.shared_bytes = room.shared_bytes;
    now.shared = room.shared;
    std::memset(now.shared, POISON, shared_bytes);
    for (size_t i = 0; i < CANARY_BYTES; ++i) now.shared[shared_bytes + i] = static_cast<unsigned char>(i * 7 + 13);
    now.touched = room.touched.start;
    now.fibers.resize(threads);
    now.warps.resize((threads + LANES - 1) / LANES);
    now.alive = static_cast<int>(threads);
    for (unsigned i = 0; i < threads; ++i) {
        now.fibers[i].index = static_cast<int>(i);
        now.fibers[i].thread = {i, 0, 0};
        now.fibers[i].stack = room.stacks.start + STACK_BYTES * i;
        now.fibers[i].block_phase = now.fibers[i].warp_phase = room.first_phase;
        prepare(now.fibers[i]);
    }
    now.ready.resize(threads);
    for (unsigned i = 0; i < threads; ++i) now.ready[i] = static_cast<int>(i);
    unsigned turn = 0;
    while (failure.empty() && now.alive > 0) {
        if (now.ready.empty()) {
            failure = "block " + std::to_string(block_index.x) + ": " + std::to_string(now.alive) +
                      " threads wait at barriers that others do not reach" + waiting();
            break;
        }
        std::swap(now.ready[choose(now.ready, turn++)], now.ready.back());
        current = &now.fibers[now.ready.back()];
        now.ready.pop_back();
        emulator_switch(&scheduler_stack_pointer, current->stack_pointer);
        if (current->done) {
            --now.alive;
            // Those that wait for the block do not wait for a thread that has ended.
            if (now.alive > 0 && now.barrier.arrived == now.alive) complete(now.barrier);
        }
    }
    for (const Fiber& fiber : now.fibers) room.first_phase = std::max(room.first_phase, fiber.warp_phase + 1);
    for (size_t i = 0; failure.empty() && i < CANARY_BYTES; ++i) {
        if (now.shared[shared_bytes + i] != static_cast<unsigned char>(i * 7 + 13)) {
            failure = "block " + std::to_string(block_index.x) + ": wrote past its shared memory";
        }
    }
}

}  // namespace

void flush(bool on) {
    constexpr unsigned RESULTS_AND_OPERANDS = 0x8040;
    _mm_setcsr(on ? _mm_getcsr() | RESULTS_AND_OPERANDS : _mm_getcsr() & ~RESULTS_AND_OPERANDS);
}

std::string launch(dim3 grid, unsigned threads, size_t shared_bytes, uint64_t seed, const std::function<void()>& kernel) {
    failure.clear();
    random_state = seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
    kernel_body = &kernel;
    grid_size = grid;
    block_size = {threads, 1, 1};
    std::vector<unsigned> order(grid.x);
    for (unsigned i = 0; i < grid.x; ++i) order[i] = i;
    for (unsigned i = grid.x; i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
    Room room(threads, shared_bytes);
    // Its thread is left where it is, as after any failure, so the signal has to be able to come again.
    struct sigaction fault = {}, before;
    fault.sa_handler = [](int) { fail("no memory is where it reads or writes"); };
    fault.sa_flags = SA_NODEFER;
    sigaction(SIGSEGV, &fault, &before);
    flush(true);
    for (unsigned at : order) {
        block_index = {at, 0, 0};
        run_block(threads, room);
        if (!failure.empty()) break;
    }
    flush(false);
    sigaction(SIGSEGV, &before, nullptr);
    return failure;
}

}  // namespace emulator
