// attend_q8_0.cu as a program on the CPU: one launch, read from standard input, answered on standard output.
//
// In, little-endian, without padding: u32 order (0 forward, 1 backward), grid and block of the first and of the second
// kernel, n_list, n_query, n_page; f32 scale; i32 list_start[n_list + 1], page_list[n_page], page_rows[n_page];
// u64 k_offset[n_page], v_offset[n_page] into the bytes that come last; f32 q[n_list][n_query][HEAD_DIM];
// u64 n_bytes; the bytes of all pages.
// Out: f32 out[n_list][n_query][HEAD_DIM].

#include "cuda_host_shim.h"

#include "../attend_q8_0.cu"

template <typename T> static std::vector<T> read(size_t n)
{
    std::vector<T> values(n);
    if (std::fread(values.data(), sizeof(T), n, stdin) != n) {
        std::fprintf(stderr, "attend_q8_0_host: the input ends early\n");
        std::exit(2);
    }
    return values;
}

static std::vector<const unsigned char *> pointers(const unsigned char *base, const std::vector<uint64_t> &offsets)
{
    std::vector<const unsigned char *> pages;
    for (uint64_t offset : offsets)
        pages.push_back(base + offset);
    return pages;
}

int main()
{
    const auto head = read<uint32_t>(8);
    const auto order = head[0] ? cuda_host::Order::backward : cuda_host::Order::forward;
    const int n_list = head[5], n_query = head[6], n_page = head[7];
    const float scale = read<float>(1)[0];
    const auto list_start = read<int>(n_list + 1);
    const auto page_list = read<int>(n_page);
    const auto page_rows = read<int>(n_page);
    const auto k_offset = read<uint64_t>(n_page);
    const auto v_offset = read<uint64_t>(n_page);
    const size_t n_out = (size_t)n_list * n_query * HEAD_DIM;
    const auto q = read<float>(n_out);
    const size_t n_bytes = read<uint64_t>(1)[0];
    const auto bytes = read<unsigned char>(n_bytes);

    std::vector<uint4> arena((n_bytes + 15) / 16);
    std::memcpy(arena.data(), bytes.data(), n_bytes);
    const auto *base = (const unsigned char *)arena.data();
    const auto k_pages = pointers(base, k_offset);
    const auto v_pages = pointers(base, v_offset);

    const size_t n_part = (size_t)n_page * n_query;
    std::vector<float> part_m(n_part), part_l(n_part), part_acc(n_part * HEAD_DIM), out(n_out);
    cuda_host::launch(head[1], head[2], order, [&] {
        attend_q8_0_pages(q.data(), k_pages.data(), v_pages.data(), page_rows.data(), page_list.data(), n_query, scale,
                          part_m.data(), part_l.data(), part_acc.data());
    });
    cuda_host::launch(head[3], head[4], order, [&] {
        attend_q8_0_merge(list_start.data(), n_query, part_m.data(), part_l.data(), part_acc.data(), out.data());
    });
    return std::fwrite(out.data(), sizeof(float), n_out, stdout) == n_out ? 0 : 2;
}
