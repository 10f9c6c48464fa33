// Collectives between processes of one host, through memory that they share.
//
//     seats     one for each rank: a bell to sleep by, and whether it has gone
//     counts    steps that each rank has posted, and has read; chunks in each letter box
//     boards    for each rank, SLOTS slots that every other rank reads
//     boxes     for each pair of ranks, SLOTS slots from the one to the other
//
// A collective is a number of steps that follows from its sizes alone. In each, every rank posts a slot on its board and
// reads the others'; a slot is used again once all have read it. Messages and all-to-alls go through the boxes. Sums are
// in rank order, in fp32 at least, and rounded once: all ranks get the same bits, on every run.
//
// A lane is what a group's operations stand in line on. The head is driven by whoever waits for it, or by a thread of
// the lane's own: which takes over what was started and cannot be finished at once. Nobody spins for longer than told;
// who has nothing to do sleeps on its bell, and looks now and then whether those it waits for are alive.

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "sums.h"

namespace {

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

int64_t whole_pages(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

bool is_behind(uint32_t count, uint32_t wanted) { return int32_t(count - wanted) < 0; }

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
    int64_t blocker = -1;
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
    bool is_driven = false, wants_thread = false, is_closed = false;
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

    // The driver sleeps by the same bell.
    void wake_driver() { ring(me); }

    void ring_all() {
        for (int64_t q = 0; q < size; ++q)
            if (q != me) ring(q);
    }
};

// ---- Collectives ----------------------------------------------------------------------------------------------------

// A sum of more than ONE_STEP goes block by block: each rank sums its part of a block, and hands it to all. The next
// block is posted before the sums of this one.
struct Block {
    bool is_sum;
    int64_t first, count, part;
};

int64_t block_elements(const Operation& op) { return ROOM / width(op.type) / 16 * 16; }

bool is_one_step(const Operation& op) { return op.count * width(op.type) <= ONE_STEP; }

Block block_of(const Lane& lane, const Operation& op, int64_t t) {
    const int64_t all = block_elements(op), blocks = (op.count + all - 1) / all;
    const bool is_sum = t == 2 * blocks - 1 || (t > 0 && t % 2 == 0);
    const int64_t number = t == 0 ? 0 : is_sum ? (t == 2 * blocks - 1 ? blocks - 1 : t / 2 - 1) : (t + 1) / 2;
    const int64_t count = std::min(all, op.count - number * all);
    return {is_sum, number * all, count, (count + lane.size - 1) / lane.size};
}

// Of a part that stands at [first, first + part) of its block, what is there.
int64_t held(const Block& b, int64_t rank) {
    return std::clamp<int64_t>(b.count - rank * b.part, 0, b.part);
}

int64_t chunk_elements(const Lane& lane, const Operation& op) {
    const int64_t parts = op.kind == REDUCE_SCATTER ? lane.size : 1;
    return std::max<int64_t>(1, ROOM / width(op.type) / parts);
}

int64_t steps_of(const Lane& lane, const Operation& op) {
    if (op.kind == ALL_REDUCE && is_one_step(op)) return 1;
    if (op.kind == ALL_REDUCE) return 2 * ((op.count + block_elements(op) - 1) / block_elements(op));
    const int64_t chunk = chunk_elements(lane, op);
    return std::max<int64_t>(1, (op.count + chunk - 1) / chunk);
}

Label label_of(const Operation& op) {
    const int64_t detail = op.kind == BROADCAST ? op.peer : int64_t(op.type) * 16 + int64_t(op.rule);
    return {op.kind, detail, op.count * width(op.type)};
}

void write(const Lane& lane, const Operation& op, int64_t t, char* slot) {
    const int64_t w = width(op.type);
    new (slot) Label(label_of(op));
    char* room = slot + HEAD;
    if (op.kind == ALL_REDUCE && is_one_step(op)) {
        std::memcpy(room, op.in, op.count * w);
    } else if (op.kind == ALL_REDUCE) {
        const Block b = block_of(lane, op, t);
        if (b.is_sum) {
            std::memcpy(room, op.out + (b.first + lane.me * b.part) * w, held(b, lane.me) * w);
            return;
        }
        for (int64_t q = 0; q < lane.size; ++q)
            if (q != lane.me) std::memcpy(room + q * b.part * w, op.in + (b.first + q * b.part) * w, held(b, q) * w);
    } else {
        const int64_t chunk = chunk_elements(lane, op), first = t * chunk;
        const int64_t here = std::min(chunk, op.count - first);
        if (op.kind == REDUCE_SCATTER) {
            for (int64_t q = 0; q < lane.size; ++q)
                if (q != lane.me) std::memcpy(room + q * chunk * w, op.in + (q * op.count + first) * w, here * w);
        } else if (op.kind == ALL_GATHER || op.peer == lane.me) {
            std::memcpy(room, op.in + first * w, here * w);
        }
    }
}

// out = the sum over ranks of what stands in their slots; what is this rank's own never left it.
void sum(const Lane& lane, const Operation& op, uint32_t number, int64_t at, const char* own, char* out, int64_t count) {
    std::vector<const char*> from(lane.size);
    for (int64_t q = 0; q < lane.size; ++q) from[q] = q == lane.me ? own : lane.slot(q, number) + HEAD + at;
    combine(op.type, op.rule, from.data(), lane.size, out, count);
}

void take(const Lane& lane, const Operation& op, int64_t t, uint32_t number) {
    const int64_t w = width(op.type);
    if (op.kind == ALL_REDUCE && is_one_step(op)) {
        sum(lane, op, number, 0, op.in, op.out, op.count);
    } else if (op.kind == ALL_REDUCE) {
        const Block b = block_of(lane, op, t);
        if (!b.is_sum) {
            const int64_t at = (b.first + lane.me * b.part) * w;
            sum(lane, op, number, lane.me * b.part * w, op.in + at, op.out + at, held(b, lane.me));
            return;
        }
        for (int64_t q = 0; q < lane.size; ++q)
            if (q != lane.me)
                std::memcpy(op.out + (b.first + q * b.part) * w, lane.slot(q, number) + HEAD, held(b, q) * w);
    } else {
        const int64_t chunk = chunk_elements(lane, op), first = t * chunk;
        const int64_t here = std::min(chunk, op.count - first);
        if (op.kind == REDUCE_SCATTER) {
            sum(lane, op, number, lane.me * chunk * w, op.in + (lane.me * op.count + first) * w, op.out + first * w, here);
        } else if (op.kind == ALL_GATHER) {
            for (int64_t q = 0; q < lane.size; ++q) {
                char* to = op.out + (q * op.count + first) * w;
                const char* from = q == lane.me ? op.in + first * w : lane.slot(q, number) + HEAD;
                if (to != from) std::memcpy(to, from, here * w);
            }
        } else if (op.peer != lane.me) {
            std::memcpy(op.out + first * w, lane.slot(op.peer, number) + HEAD, here * w);
        }
    }
}

bool has_label(const Operation& op, const char* slot) {
    const Label wanted = label_of(op);
    return std::memcmp(slot, &wanted, sizeof wanted) == 0;
}

// Goes as far as the others let it: DONE, UNDER_WAY, or CROSSED.
int advance_steps(Lane& lane, Operation& op) {
    for (bool has_moved = true; has_moved;) {
        has_moved = false;
        while (op.posted < op.steps) {
            const int64_t t = op.posted;
            if (op.kind == ALL_REDUCE && !is_one_step(op)) {
                // A sum is handed on once it is made: two steps after its block was posted, but for the ends.
                const Block b = block_of(lane, op, t);
                const int64_t made = b.first == 0 ? 0 : 2 * (b.first / block_elements(op)) - 1;
                if (b.is_sum && op.read <= made) break;
            }
            const uint32_t number = lane.step + uint32_t(t), free = number + 1 - uint32_t(SLOTS);
            bool is_free = true;
            for (int64_t q = 0; q < lane.size && is_free; ++q)
                if (q != lane.me && is_behind(lane.read[q].value.load(std::memory_order_acquire), free)) {
                    is_free = false;
                    op.blocker = q;
                }
            if (!is_free) break;
            write(lane, op, t, lane.slot(lane.me, number));
            lane.posted[lane.me].value.store(number + 1, std::memory_order_release);
            lane.ring_all();
            ++op.posted;
            has_moved = true;
        }
        while (op.read < op.posted) {
            const uint32_t number = lane.step + uint32_t(op.read);
            bool is_there = true;
            for (int64_t q = 0; q < lane.size && is_there; ++q) {
                if (q == lane.me) continue;
                if (is_behind(lane.posted[q].value.load(std::memory_order_acquire), number + 1)) {
                    is_there = false;
                    op.blocker = q;
                } else if (!has_label(op, lane.slot(q, number))) {
                    op.blocker = q;
                    return CROSSED;
                }
            }
            if (!is_there) break;
            take(lane, op, op.read, number);
            lane.read[lane.me].value.store(number + 1, std::memory_order_release);
            lane.ring_all();
            ++op.read;
            has_moved = true;
        }
    }
    if (op.read < op.steps) return UNDER_WAY;
    lane.step += uint32_t(op.steps);
    return DONE;
}

// ---- Messages -------------------------------------------------------------------------------------------------------

int advance_messages(Lane& lane, Operation& op) {
    bool is_done = true;
    for (bool has_moved = true; has_moved;) {
        has_moved = false;
        is_done = true;
        for (int64_t ahead = 0; ahead < lane.size; ++ahead) {
            const int64_t q = (lane.me + ahead) % lane.size;
            if (q == lane.me) continue;
            Count &posted = lane.box_posted[lane.pair(lane.me, q)], &taken = lane.box_taken[lane.pair(lane.me, q)];
            while (op.sent[q] < op.going[q]) {
                const uint32_t number = posted.value.load(std::memory_order_relaxed);
                if (number - taken.value.load(std::memory_order_acquire) >= SLOTS) {
                    op.blocker = q;
                    break;
                }
                char* slot = lane.box(lane.me, q, number);
                const int64_t bytes = std::min(ROOM, op.going[q] - op.sent[q]);
                new (slot) Label{op.kind == ALL_TO_ALL ? ALL_TO_ALL : SEND, op.going[q], op.sent[q]};
                std::memcpy(slot + HEAD, op.in + op.going_at[q] + op.sent[q], bytes);
                posted.value.store(number + 1, std::memory_order_release);
                lane.ring(q);
                op.sent[q] += bytes;
                has_moved = true;
            }
            is_done = is_done && op.sent[q] == op.going[q];
        }
        for (int64_t ahead = 0; ahead < lane.size; ++ahead) {
            const int64_t q = (lane.me + lane.size - ahead) % lane.size;
            if (q == lane.me) continue;
            Count &posted = lane.box_posted[lane.pair(q, lane.me)], &taken = lane.box_taken[lane.pair(q, lane.me)];
            while (op.got[q] < op.coming[q]) {
                const uint32_t number = taken.value.load(std::memory_order_relaxed);
                if (number == posted.value.load(std::memory_order_acquire)) {
                    op.blocker = q;
                    break;
                }
                const char* slot = lane.box(q, lane.me, number);
                const Label wanted{op.kind == ALL_TO_ALL ? ALL_TO_ALL : SEND, op.coming[q], op.got[q]};
                if (std::memcmp(slot, &wanted, sizeof wanted) != 0) {
                    op.blocker = q;
                    return CROSSED;
                }
                const int64_t bytes = std::min(ROOM, op.coming[q] - op.got[q]);
                std::memcpy(op.out + op.coming_at[q] + op.got[q], slot + HEAD, bytes);
                taken.value.store(number + 1, std::memory_order_release);
                lane.ring(q);
                op.got[q] += bytes;
                has_moved = true;
            }
            is_done = is_done && op.got[q] == op.coming[q];
        }
    }
    return is_done ? DONE : UNDER_WAY;
}

// ---- The line -------------------------------------------------------------------------------------------------------

bool is_collective(const Operation& op) { return op.kind < ALL_TO_ALL; }
bool is_message(const Operation& op) { return op.kind > ALL_TO_ALL; }

int advance(Lane& lane, Operation& op) {
    if (!op.has_begun) {
        op.has_begun = true;
        op.since = Clock::now();
        if (is_collective(op))
            op.steps = steps_of(lane, op);
        else if (op.kind == ALL_TO_ALL)
            std::memcpy(op.out + op.coming_at[lane.me], op.in + op.going_at[lane.me], op.going[lane.me]);
    }
    return is_collective(op) ? advance_steps(lane, op) : advance_messages(lane, op);
}

bool is_dead(const Lane& lane, int64_t rank) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = lane.locks[rank];
    lock.l_len = 1;
    return fcntl(lane.file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

// Those without whom an operation cannot go on now. Of others it may have all that they will ever say.
std::vector<int64_t> missing(const Lane& lane, const Operation& op) {
    std::vector<int64_t> found;
    for (int64_t q = 0; q < lane.size && op.has_begun; ++q) {
        if (q == lane.me) continue;
        const uint32_t number = lane.step + uint32_t(op.read);
        const bool is_missing =
            !is_collective(op)      ? op.sent[q] < op.going[q] || op.got[q] < op.coming[q]
            : op.read < op.posted   ? is_behind(lane.posted[q].value.load(std::memory_order_acquire), number + 1)
                                    : is_behind(lane.read[q].value.load(std::memory_order_acquire),
                                                lane.step + uint32_t(op.posted) + 1 - uint32_t(SLOTS));
        if (is_missing) found.push_back(q);
    }
    return found;
}

// What may be under way at once: the first in line; and where that is a message, those behind it, to and from others,
// so that two ranks may send to each other before either receives.
std::vector<std::shared_ptr<Operation>> movable(const Lane& lane) {
    std::vector<std::shared_ptr<Operation>> found;
    for (const auto& op : lane.line) {
        if (!found.empty() && !is_message(*op)) break;
        const bool is_behind_another = std::any_of(found.begin(), found.end(), [&](const auto& other) {
            return other->kind == op->kind && other->peer == op->peer;
        });
        if (!is_behind_another) found.push_back(op);
        if (!is_message(*op)) break;
    }
    return found;
}

// With the mutex held: nothing that is in line will ever be done.
void fail(Lane& lane, int status, int64_t culprit) {
    lane.failed = status;
    lane.culprit = culprit;
    for (auto& op : lane.line) {
        op->blocker = culprit;
        op->status.store(status);
    }
    lane.line.clear();
}

// With the mutex held and given away meanwhile: moves what can be moved. Whether something came to its end.
bool pass(Lane& lane, std::unique_lock<std::mutex>& lock) {
    const auto ops = movable(lane);
    lock.unlock();
    std::vector<int> found;
    for (const auto& op : ops) found.push_back(advance(lane, *op));
    lock.lock();
    bool has_ended = false;
    for (size_t i = 0; i < ops.size(); ++i) {
        if (found[i] == UNDER_WAY) continue;
        has_ended = true;
        if (found[i] != DONE) {
            fail(lane, found[i], ops[i]->blocker);
            break;
        }
        ops[i]->status.store(DONE);
        lane.line.erase(std::find(lane.line.begin(), lane.line.end(), ops[i]));
    }
    if (lane.line.empty()) lane.wants_thread = false;
    if (has_ended) lane.changed.notify_all();
    return has_ended;
}

// With the mutex held: whether one of some ranks is missing for good, after which nothing in line will be done.
bool is_cut_off(Lane& lane, const std::vector<char>& is_gone, int status) {
    for (const auto& op : movable(lane))
        for (const int64_t rank : missing(lane, *op))
            if (is_gone[rank]) {
                fail(lane, status, rank);
                return true;
            }
    return false;
}

// With the mutex held and given away meanwhile: looks after those that are missing, and at the time.
void look(Lane& lane, std::unique_lock<std::mutex>& lock) {
    lane.next_look = Clock::now() + LOOK_EVERY;
    std::vector<char> is_gone(lane.size), is_asked(lane.size);
    for (const auto& op : movable(lane))
        for (const int64_t rank : missing(lane, *op)) is_asked[rank] = true;
    lock.unlock();
    for (int64_t rank = 0; rank < lane.size; ++rank) is_gone[rank] = is_asked[rank] && is_dead(lane, rank);
    lock.lock();
    // Who has gone did so after its last word: that is looked for once more.
    if (pass(lane, lock) || is_cut_off(lane, is_gone, DEAD)) return;
    for (const auto& op : movable(lane)) {
        const auto ranks = missing(lane, *op);
        const std::chrono::duration<double> waited = Clock::now() - op->since;
        if (!ranks.empty() && waited.count() > lane.timeout_s) return fail(lane, LATE, ranks.front());
    }
}

// With the mutex held and given away meanwhile: sleeps until another rank has moved, or it is time to look after them.
void sleep(Lane& lane, std::unique_lock<std::mutex>& lock) {
    Seat& seat = lane.seats[lane.me];
    const uint32_t seen = seat.bell.load();
    seat.asleep.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::vector<char> has_left(lane.size);
    for (int64_t q = 0; q < lane.size; ++q) has_left[q] = lane.seats[q].left.load() != 0;
    if (!pass(lane, lock) && !lane.is_closing.load() && !is_cut_off(lane, has_left, LEFT)) {
        const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(lane.next_look - Clock::now());
        if (left.count() > 0) {
            lock.unlock();
            const timespec patience{0, left.count()};
            syscall(SYS_futex, &seat.bell, FUTEX_WAIT, seen, &patience, nullptr, 0);
            lock.lock();
        }
        // Not told by how the sleep ended: signals and bells may end each before its time.
        if (Clock::now() >= lane.next_look) look(lane, lock);
    }
    seat.asleep.store(0, std::memory_order_relaxed);
}

// With the mutex held and given away meanwhile: moves what is in line until ``op`` has come to its end, or everything
// has. Only one thread of a process is in here for a lane.
void drive(Lane& lane, std::unique_lock<std::mutex>& lock, const Operation* op) {
    lane.is_driven = true;
    lane.next_look = Clock::now() + LOOK_EVERY;
    const auto is_over = [&] {
        return lane.line.empty() || lane.is_closing.load() || (op != nullptr && op->status.load() != UNDER_WAY);
    };
    while (!is_over()) {
        if (pass(lane, lock)) continue;
        const auto spun = Clock::now() + std::chrono::nanoseconds(lane.spin_ns);
        bool has_moved = false;
        while (!has_moved && lane.spin_ns > 0 && Clock::now() < spun) has_moved = pass(lane, lock);
        if (!has_moved && !is_over()) sleep(lane, lock);
    }
    lane.is_driven = false;
    lane.changed.notify_all();
}

void serve(Lane& lane) {
    std::unique_lock lock(lane.mutex);
    for (;;) {
        lane.changed.wait(lock, [&] {
            return lane.is_closing.load() || (lane.wants_thread && !lane.is_driven && !lane.line.empty());
        });
        if (lane.is_closing.load()) return;
        drive(lane, lock, nullptr);
    }
}

// All that this rank has to say is said: no other waits for what is left of it.
bool is_heard(const Operation& op) {
    return is_collective(op) ? op.steps == 1 && op.posted == 1
                             : op.kind == RECEIVE && op.coming[op.peer] <= ROOM;
}

struct Handle {
    std::shared_ptr<Operation> op;
};

}  // namespace

extern "C" {

int64_t lane_bytes(int64_t size) {
    const int64_t head = whole_pages((size * 3 + size * size * 2) * 128);
    return head + (size + size * size) * SLOTS * SLOT;
}

// Opens a group's part of the file, which begins at ``offset`` and is all zeros at first. ``locks`` says for each rank
// of the group the byte of the file that its process keeps locked.
Lane* lane_open(int file, int64_t offset, int64_t me, int64_t size, const int64_t* locks, double timeout_s,
                int64_t spin_ns) {
    const int64_t length = lane_bytes(size);
    void* base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, offset);
    if (base == MAP_FAILED) return nullptr;
    Lane* lane = new Lane;
    lane->base = static_cast<char*>(base);
    lane->length = length;
    lane->file = file;
    lane->me = me;
    lane->size = size;
    lane->locks.assign(locks, locks + size);
    lane->timeout_s = timeout_s;
    lane->spin_ns = spin_ns;
    lane->seats = reinterpret_cast<Seat*>(base);
    lane->posted = reinterpret_cast<Count*>(lane->seats + size);
    lane->read = lane->posted + size;
    lane->box_posted = lane->read + size;
    lane->box_taken = lane->box_posted + size * size;
    lane->boards = lane->base + whole_pages((size * 3 + size * size * 2) * 128);
    lane->boxes = lane->boards + size * SLOTS * SLOT;
    return lane;
}

// Starts an operation. ``is_waited``: the caller waits for it at once, so that no thread need take it over.
Handle* lane_start(Lane* lane, int64_t kind, int64_t type, int64_t rule, int64_t peer, const void* in, void* out,
                   int64_t count, const int64_t* going, const int64_t* coming, int64_t is_waited) {
    auto op = std::make_shared<Operation>();
    op->kind = Kind(kind);
    op->type = Type(type);
    op->rule = Rule(rule);
    op->peer = peer;
    op->in = static_cast<const char*>(in);
    op->out = static_cast<char*>(out);
    op->count = count;
    if (op->kind >= ALL_TO_ALL) {
        for (auto* list : {&op->going, &op->coming, &op->going_at, &op->coming_at, &op->sent, &op->got})
            list->assign(lane->size, 0);
        const int64_t bytes = count * width(op->type);
        if (op->kind == SEND) op->going[peer] = bytes;
        if (op->kind == RECEIVE) op->coming[peer] = bytes;
        for (int64_t q = 0, out_at = 0, in_at = 0; op->kind == ALL_TO_ALL && q < lane->size; ++q) {
            op->going[q] = going[q];
            op->coming[q] = coming[q];
            op->going_at[q] = in_at;
            op->coming_at[q] = out_at;
            in_at += going[q];
            out_at += coming[q];
        }
    }
    std::unique_lock lock(lane->mutex);
    if (lane->failed != DONE || lane->is_closed) {
        op->blocker = lane->culprit;
        op->status.store(lane->failed != DONE ? lane->failed : CLOSED);
        return new Handle{op};
    }
    lane->line.push_back(op);
    const bool is_alone = lane->line.size() == 1;
    if (!lane->is_driven) {
        lane->is_driven = true;
        pass(*lane, lock);
        lane->is_driven = false;
        lane->changed.notify_all();
    } else {
        lane->wake_driver();
    }
    if (op->status.load() == UNDER_WAY && !is_waited && !(is_alone && is_heard(*op))) {
        try {
            if (!lane->thread.joinable()) lane->thread = std::thread([lane] { serve(*lane); });
        } catch (const std::system_error&) {  // there are too many: who waits for it drives it
        }
        lane->wants_thread = true;
        lane->changed.notify_all();
    }
    return new Handle{op};
}

// Returns once the operation has come to its end, good or bad.
void lane_wait(Lane* lane, const Handle* handle) {
    const Operation& op = *handle->op;
    if (op.status.load() != UNDER_WAY) return;
    std::unique_lock lock(lane->mutex);
    while (op.status.load() == UNDER_WAY) {
        if (lane->is_driven || lane->is_closing.load())
            lane->changed.wait(lock);
        else
            drive(*lane, lock, &op);
    }
}

// Moves what can be moved at once, where nobody does.
void lane_pass(Lane* lane) {
    std::unique_lock lock(lane->mutex);
    if (lane->is_driven || lane->is_closing.load() || lane->line.empty()) return;
    lane->is_driven = true;
    pass(*lane, lock);
    lane->is_driven = false;
    lane->changed.notify_all();
}

int lane_look(const Handle* handle, int64_t* blocker) {
    *blocker = handle->op->blocker;
    return handle->op->status.load();
}

void lane_drop(Handle* handle) { delete handle; }

// Says to the others that this rank has left, and ends what is under way.
void lane_close(Lane* lane) {
    if (getpid() != lane->owner) return;  // a fork of the rank, that is none
    {
        std::unique_lock lock(lane->mutex);
        if (lane->is_closed) return;
        lane->is_closed = true;
        lane->is_closing.store(true);
        lane->wake_driver();
        lane->changed.notify_all();
        lane->changed.wait(lock, [&] { return !lane->is_driven; });
        fail(*lane, CLOSED, -1);
        lane->changed.notify_all();
        lane->seats[lane->me].left.store(1);
        lane->ring_all();
    }
    if (lane->thread.joinable()) lane->thread.join();
    munmap(lane->base, lane->length);
}

void lane_free(Lane* lane) {
    if (getpid() != lane->owner) return;
    lane_close(lane);
    delete lane;
}

}  // extern "C"
