// A lane's memory: what the ranks of a group share, and what each keeps to itself.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "sums.h"

namespace superstep {

using Clock = std::chrono::steady_clock;

constexpr int64_t SLOTS = 4;
constexpr int64_t SLOT = 256 << 10;
constexpr int64_t HEAD = 64;
constexpr int64_t ROOM = SLOT - HEAD;
constexpr int64_t ONE_STEP = 64 << 10;
constexpr int64_t PAGE = 4096;
constexpr std::chrono::milliseconds LOOK_EVERY{100};

enum Status : int { DONE = 0, UNDER_WAY = 1, LATE = -1, DEAD = -2, LEFT = -3, CLOSED = -4, CROSSED = -5 };

enum Kind : int64_t { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, SEND, RECEIVE };

struct alignas(128) Seat {
    std::atomic<uint32_t> bell, asleep, left;
};

struct alignas(128) Count {
    std::atomic<uint32_t> value;
};

// What a slot holds, so that ranks that are not at the same operation find out.
struct Label {
    int64_t kind, detail, bytes;
};

// Of the seats and counts of so many ranks.
inline int64_t head_bytes(int64_t size) {
    const int64_t bytes = size * sizeof(Seat) + (2 * size + 2 * size * size) * sizeof(Count);
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

inline bool is_behind(uint32_t count, uint32_t wanted) { return int32_t(count - wanted) < 0; }

struct Operation {
    Kind kind;
    Type type;
    Rule rule;
    int64_t peer;
    const char* in;
    char* out;
    int64_t count;  // elements: of all that is summed; of one rank's part where there are parts
    std::vector<int64_t> going, coming, going_at, coming_at;  // bytes, of messages
    int64_t steps = 0, posted = 0, read = 0;
    std::vector<int64_t> sent, got;
    bool has_begun = false;
    Clock::time_point since;
    std::atomic<int> status = UNDER_WAY;
    int64_t culprit = -1;
};

struct Lane {
    char* base;
    int64_t length;
    int file;
    int64_t me, size;
    std::vector<int64_t> locks;
    double timeout_s;
    int64_t spin_ns;

    Seat* seats;
    Count *posted, *read, *box_posted, *box_taken;
    char *boards, *boxes;
    uint32_t step = 0;

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Operation>> line;
    bool is_driven = false, wants_thread = false;
    std::atomic<bool> is_closing = false;
    int failed = DONE;
    int64_t culprit = -1;
    Clock::time_point next_look;
    const pid_t owner = getpid();
    std::thread thread;

    char* slot(int64_t rank, uint32_t number) const { return boards + (rank * SLOTS + number % SLOTS) * SLOT; }
    int64_t pair(int64_t from, int64_t to) const { return from * size + to; }
    char* box(int64_t from, int64_t to, uint32_t number) const {
        return boxes + (pair(from, to) * SLOTS + number % SLOTS) * SLOT;
    }

    void ring(int64_t rank) {
        Seat& seat = seats[rank];
        // With the fence in sleep(): either that rank sees what was published, or we see that it sleeps.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (seat.asleep.load(std::memory_order_relaxed)) {
            seat.bell.fetch_add(1);
            syscall(SYS_futex, &seat.bell, FUTEX_WAKE, 1, nullptr, nullptr, 0);
        }
    }

    // Step number ``number`` of another rank is there to be read.
    bool has_posted(int64_t rank, uint32_t number) const {
        return !is_behind(posted[rank].value.load(std::memory_order_acquire), number + 1);
    }

    // It has read what stands where step ``number`` of this rank is to be posted.
    bool has_room(int64_t rank, uint32_t number) const {
        return !is_behind(read[rank].value.load(std::memory_order_acquire), number + 1 - uint32_t(SLOTS));
    }

    // The driver sleeps by the same bell.
    void wake_driver() { ring(me); }

    void ring_all() {
        for (int64_t q = 0; q < size; ++q)
            if (q != me) ring(q);
    }
};

}  // namespace superstep
