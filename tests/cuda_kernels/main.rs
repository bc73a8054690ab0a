//! The CUDA kernels without a GPU: the same .cu text as a program on the CPU, against attention in f64 on the same bytes;
//! with the `cuda` feature also the launcher's plan, and real compilation to cubins where NVRTC is installed.
//!
//! A test whose tool the machine lacks says so on standard error and passes. The checks have been seen to fail for each
//! of these changes to the kernel: any one barrier left out, a row too few or too many in the sums or in the maximum, the
//! page's m left out of the merge, the maximum of one warp only, `scale` or the query's index ignored, the pad of a head
//! of 80 values read, codes read as unsigned.

mod batch;
#[cfg(feature = "nvrtc")]
mod device;
mod host;

use batch::{Batch, Judged};
use host::{HostProgram, Order};

const LISTS: [usize; 5] = [1, 127, 128, 129, 1000];

fn attend_program(head_dim: usize) -> Option<HostProgram> {
    HostProgram::build("attend_q8_0_host.cpp", &[format!("-DHEAD_DIM={head_dim}")])
}

/// Attends, both orders of threads, whose bits must agree: `[list][query][head_dim]`.
fn attend(program: &HostProgram, batch: &Batch) -> Vec<f32> {
    let forward = program.attend(&batch.input(Order::Forward));
    let backward = program.attend(&batch.input(Order::Backward));
    assert!(
        bits(&forward) == bits(&backward),
        "the order of threads shows: a barrier is missing"
    );
    forward
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn agrees_with_the_reference(head_dim: usize) {
    let Some(program) = attend_program(head_dim) else {
        return;
    };
    for n_query in [1, 3, 4] {
        let batch = Batch::random(head_dim, n_query, &LISTS);
        let out = attend(&program, &batch);
        let judged = batch.judge(&out);
        println!("head_dim {head_dim}, {n_query} queries: {judged:?}");
        assert!(
            judged.worst <= 1.0,
            "head_dim {head_dim}, {n_query} queries: {judged:?}"
        );
        let only_row = batch.decode_v(0, 0);
        for query in out.chunks(head_dim).take(n_query) {
            assert_eq!(
                bits(query),
                bits(&only_row),
                "one row: its V comes back to the bit"
            );
        }
    }
}

#[test]
fn head_dim_64() {
    agrees_with_the_reference(64);
}

#[test]
fn head_dim_80_with_a_padded_block() {
    agrees_with_the_reference(80);
}

#[test]
fn head_dim_128() {
    agrees_with_the_reference(128);
}

#[test]
fn head_dim_256() {
    agrees_with_the_reference(256);
}

/// Scores apart by thousands: all weights but a few are zero, wherever the largest score stands, and nothing overflows.
#[test]
fn huge_differences_of_scores() {
    let Some(program) = attend_program(64) else {
        return;
    };
    let mut batch = Batch::random(64, 3, &LISTS);
    batch.q.iter_mut().for_each(|q| *q *= 500.0);
    let judged = batch.judge(&attend(&program, &batch));
    println!("{judged:?}");
    assert!(
        judged.worst <= 1.0 && judged.largest_score > 2000.0,
        "{judged:?}"
    );
    assert!(
        judged.largest_error < 1e-6,
        "one row has all the weight, so the scores' rounding can't show: {judged:?}"
    );
}

/// A list's numbers don't depend on what else is in the launch, nor on how many queries share it.
#[test]
fn a_list_alone_gives_the_same_bits() {
    let Some(program) = attend_program(64) else {
        return;
    };
    let batch = Batch::random(64, 3, &LISTS);
    let together = attend(&program, &batch);
    for list in 0..LISTS.len() {
        for query in 0..3 {
            let alone = attend(&program, &batch.only(list, query));
            let at = (list * 3 + query) * 64;
            assert_eq!(
                bits(&alone),
                bits(&together[at..at + 64]),
                "list {list}, query {query}"
            );
        }
    }
}

/// The comparison can fail: one bit of one code of K moves the outputs of its list beyond the tolerance, and no others.
#[test]
fn one_flipped_bit_shows() {
    let Some(program) = attend_program(64) else {
        return;
    };
    let batch = Batch::random(64, 3, &LISTS);
    let out = attend(&program, &batch);
    let mut flipped = batch.clone();
    let list = 2;
    let code = 100 * batch.row_bytes() + 2 + 7;
    flipped.k[list][code] ^= 0x40;
    let changed = attend(&program, &flipped);
    let Judged { worst, .. } = batch.judge(&changed);
    assert!(worst > 10.0, "a changed K went unseen: {worst}");
    let per_list = 3 * 64;
    for (other, (a, b)) in out
        .chunks(per_list)
        .zip(changed.chunks(per_list))
        .enumerate()
    {
        assert_eq!(bits(a) == bits(b), other != list, "list {other}");
    }
}

#[test]
fn f16_converts_exactly() {
    let Some(program) = HostProgram::build("shim_host.cpp", &[]) else {
        return;
    };
    let converted = program.run(&["f16", "forward"]);
    assert_eq!(converted.len(), 4 * 65536);
    for (pattern, value) in (0..=u16::MAX).zip(converted.as_chunks::<4>().0) {
        let (ours, want) = (
            f32::from_le_bytes(*value),
            half::f16::from_bits(pattern).to_f32(),
        );
        assert!(
            ours.to_bits() == want.to_bits() || (ours.is_nan() && want.is_nan()),
            "{pattern:#06x}: {ours} {want}"
        );
    }
}

/// The shim shuffles as a warp does, holds barriers, shows a missing one, and ends a block that would hang.
#[test]
fn the_shim_behaves_like_a_block() {
    let Some(program) = HostProgram::build("shim_host.cpp", &[]) else {
        return;
    };
    let numbers = |what: &str, order: &str| -> Vec<u32> {
        let printed = program.run(&[what, order]);
        printed
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| u32::from_le_bytes(*word))
            .collect()
    };
    let shuffled: Vec<u32> = (0..64)
        .map(|thread| {
            let (first, lane) = (thread / 32 * 32, thread % 32);
            let sum: u32 = (first..first + 32).sum();
            sum * 10000 + (lane + 1).min(31) * 100 + first + 3
        })
        .collect();
    let neighbours: Vec<u32> = (0..64).map(|thread| (thread + 1) % 64 + 1).collect();
    for order in ["forward", "backward"] {
        assert_eq!(numbers("warp", order), shuffled);
        assert_eq!(numbers("barrier", order), neighbours);
        let (status, message) = program.fail(&["hang", order]);
        assert!(
            status == Some(3) && message.contains("different barriers"),
            "{status:?}: {message}"
        );
    }
    assert_ne!(
        numbers("no-barrier", "forward"),
        numbers("no-barrier", "backward")
    );
}
