//! What projections must do: agree with their definition in f64, invert or approximate as promised, absorb exactly what
//! they expand, and choose the basis that the covariance asks for.

use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::cache::project::STAGES;
use crate::cache::rope::{PairLayout, Rope};
use crate::cache::stage::{
    BuildContext, Calibration, HeadCovariance, KeyForm, Params, Projection, Side, Stage,
    StageError, Value,
};
use crate::cache::{Geometry, LayerGeometry};

const N_LAYERS: usize = 2;
const N_KV_HEADS: usize = 2;

fn geometry(head_dim: usize) -> Geometry {
    let rope = Arc::new(Rope::new(PairLayout::HalfSplit, Vec::new(), 0));
    Geometry {
        layers: vec![
            LayerGeometry {
                n_heads: 4,
                n_kv_heads: N_KV_HEADS,
                head_dim,
                scale: 1.0,
                rope,
                window: None,
            };
            N_LAYERS
        ],
    }
}

fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// Second moments of rows whose channels are mixed and of falling size.
fn covariance(dim: usize, seed: u64) -> Vec<f64> {
    let mut c = vec![0.0; dim * dim];
    for i in 0..4 * dim {
        let mut row: Vec<f64> = noise(dim, seed * 1000 + i as u64)
            .iter()
            .enumerate()
            .map(|(d, &x)| f64::from(x) * 0.8f64.powi(d as i32))
            .collect();
        for d in 1..dim {
            row[d] += 0.3 * row[d - 1];
        }
        for a in 0..dim {
            for b in 0..dim {
                c[a * dim + b] += row[a] * row[b] / (4 * dim) as f64;
            }
        }
    }
    c
}

fn calibration(dim: usize) -> Calibration {
    let head = |seed| HeadCovariance {
        k_pre: covariance(dim, seed),
        k_post: covariance(dim, seed + 1),
        v: covariance(dim, seed + 2),
    };
    Calibration {
        heads: (0..N_LAYERS)
            .map(|l| {
                (0..N_KV_HEADS)
                    .map(|h| head(10 * (2 * l + h) as u64))
                    .collect()
            })
            .collect(),
        n_tokens: 4 * dim,
        rows: Vec::new(),
        positions: Vec::new(),
    }
}

fn built(
    name: &str,
    given: &[(&str, i64)],
    context: &BuildContext<'_>,
) -> Result<Arc<dyn Projection>, StageError> {
    let def = STAGES.iter().find(|d| d.name == name).unwrap();
    let given = Params(
        given
            .iter()
            .map(|&(k, v)| (k.to_owned(), Value::Int(v)))
            .collect(),
    );
    let params = Params::resolve(def, &given).unwrap();
    match (def.build)(&params, context)? {
        Stage::Project(map) => Ok(map),
        _ => panic!("{name} is not a projection"),
    }
}

fn context<'a>(geometry: &'a Geometry, calibration: Option<&'a Calibration>) -> BuildContext<'a> {
    BuildContext {
        geometry,
        keys: KeyForm::PostRope,
        side: Side::K,
        calibration,
        backing_dir: None,
        head: None,
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(&x, &y)| f64::from(x) * f64::from(y))
        .sum()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let d: Vec<f32> = a.iter().zip(b).map(|(x, y)| x - y).collect();
    dot(&d, &d).sqrt()
}

fn refusal(result: Result<Arc<dyn Projection>, StageError>) -> String {
    match result {
        Ok(_) => panic!("it was built"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn hadamard_is_the_signed_sum_that_its_matrix_says() {
    for (dim, block) in [(2, 2), (64, 64), (128, 64), (80, 16), (20, 4), (256, 64)] {
        let g = geometry(dim);
        let map = built("hadamard", &[], &context(&g, None)).unwrap();
        let x = noise(dim, 4);
        let mut z = vec![0.0; dim];
        map.forward(0, 0, &x, &mut z);
        for (i, &z) in z.iter().enumerate() {
            let (first, row) = (i / block * block, i % block);
            // Sylvester's matrix: the sign is the parity of the common bits of row and column.
            let want: f64 = (0..block)
                .map(|j| {
                    let sign = 1.0 - 2.0 * f64::from((row & j).count_ones() % 2);
                    sign * f64::from(x[first + j])
                })
                .sum::<f64>()
                / (block as f64).sqrt();
            assert!((f64::from(z) - want).abs() < 1e-5, "{dim} channel {i}");
        }
    }
}

#[test]
fn hadamard_is_its_own_inverse_and_keeps_products() {
    for dim in [2, 20, 64, 80, 128] {
        let g = geometry(dim);
        let map = built("hadamard", &[("block", 32)], &context(&g, None)).unwrap();
        let (x, q) = (noise(dim, 1), noise(dim, 2));
        let [mut z, mut q_z, mut back] = [vec![0.0; dim], vec![0.0; dim], vec![0.0; dim]];
        map.forward(1, 1, &x, &mut z);
        map.absorb(1, 1, &q, &mut q_z);
        map.expand(1, 1, &z, &mut back);
        assert_ne!(x, z);
        assert!(distance(&x, &back) < 1e-6 * dot(&x, &x).sqrt());
        assert!((dot(&q, &x) - dot(&q_z, &z)).abs() < 1e-5);
        assert_eq!(map.weight_bytes(), 0);
        assert_eq!(map.output_dim(dim), dim);
    }
}

#[test]
fn hadamard_spreads_the_drawn_outlier() {
    let g = geometry(4);
    let map = built("hadamard", &[], &context(&g, None)).unwrap();
    let mut z = [0.0; 4];
    map.forward(0, 0, &[0.0, 8.0, 0.0, 0.0], &mut z);
    assert_eq!(z, [4.0, -4.0, 4.0, -4.0]);
}

#[test]
fn hadamard_refuses_what_it_cannot_rotate() {
    let odd = geometry(33);
    let message = refusal(built("hadamard", &[], &context(&odd, None)));
    assert!(
        message.contains("layer 0 has head_dim 33") && message.contains("random_rotation"),
        "{message}"
    );
    let message = refusal(built(
        "hadamard",
        &[("block", 24)],
        &context(&geometry(64), None),
    ));
    assert!(message.contains("`block` is 24"), "{message}");
    // A latent of odd rank behind an even head_dim stays as it is.
    let map = built("hadamard", &[], &context(&geometry(64), None)).unwrap();
    let mut z = [0.0; 3];
    map.forward(0, 0, &[1.0, 2.0, 3.0], &mut z);
    assert_eq!(z, [1.0, 2.0, 3.0]);
}

#[test]
fn random_rotations_serve_any_width_and_are_shared() {
    for dim in [1, 2, 20, 33, 64, 80] {
        let g = geometry(dim);
        let map = built("random_rotation", &[], &context(&g, None)).unwrap();
        let (x, q) = (noise(dim, 1), noise(dim, 2));
        let [mut z, mut q_z, mut back] = [vec![9.0; dim], vec![9.0; dim], vec![9.0; dim]];
        map.forward(1, 1, &x, &mut z);
        map.absorb(1, 0, &q, &mut q_z);
        map.expand(0, 1, &z, &mut back);
        assert!(distance(&x, &back) < 2e-6 * dot(&x, &x).sqrt());
        assert!((dot(&q, &x) - dot(&q_z, &z)).abs() < 1e-5);
        // One matrix for two layers and two heads.
        assert_eq!(map.weight_bytes(), 4 * (dim * dim) as u64);
        assert_eq!(map.output_dim(dim), dim);
        let other = built("random_rotation", &[("seed", 5)], &context(&g, None)).unwrap();
        other.forward(1, 1, &x, &mut q_z);
        assert!(dim == 1 || z != q_z);
    }
    let mut mixed = geometry(8);
    mixed.layers[1].head_dim = 5;
    let map = built("random_rotation", &[], &context(&mixed, None)).unwrap();
    assert_eq!(map.weight_bytes(), 4 * (64 + 25));
    let mut z = [0.0; 5];
    map.forward(1, 0, &[1.0, 0.0, 0.0, 0.0, 0.0], &mut z);
    assert!((dot(&z, &z) - 1.0).abs() < 1e-6);
}

#[test]
fn random_rotations_spread_an_outlier() {
    let g = geometry(64);
    let map = built("random_rotation", &[], &context(&g, None)).unwrap();
    let (mut x, mut z) = (vec![0.0; 64], vec![0.0; 64]);
    x[5] = 8.0;
    map.forward(0, 0, &x, &mut z);
    let largest = z.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    assert!(largest < 4.0, "{largest}");
}

/// Energy of the covariance inside the span of the map's basis, over all of it.
fn kept_energy(map: &dyn Projection, c: &[f64], dim: usize, rank: usize) -> f64 {
    let mut kept = 0.0;
    for r in 0..rank {
        let b = column(map, (0, 0), dim, (rank, r));
        for i in 0..dim {
            for j in 0..dim {
                kept += f64::from(b[i]) * c[i * dim + j] * f64::from(b[j]);
            }
        }
    }
    kept / (0..dim).map(|i| c[i * dim + i]).sum::<f64>()
}

fn column(
    map: &dyn Projection,
    (layer, head): (usize, usize),
    dim: usize,
    (rank, r): (usize, usize),
) -> Vec<f32> {
    let mut unit = vec![0.0; rank];
    unit[r] = 1.0;
    let mut b = vec![0.0; dim];
    map.expand(layer, head, &unit, &mut b);
    b
}

#[test]
fn svd_keeps_the_largest_eigenvalues_of_the_right_covariance() {
    let dim = 24;
    let (g, cal) = (geometry(dim), calibration(dim));
    for (side, keys, at) in [
        (Side::K, KeyForm::PreRope, 0),
        (Side::K, KeyForm::PostRope, 1),
        (Side::V, KeyForm::PreRope, 2),
        (Side::V, KeyForm::PostRope, 2),
    ] {
        let context = BuildContext {
            side,
            keys,
            ..context(&g, Some(&cal))
        };
        let head = &cal.heads[0][0];
        let all = [&head.k_pre, &head.k_post, &head.v];
        let mut last = 0.0;
        for rank in [1, 4, 12, 24] {
            let map = built("svd", &[("rank", rank)], &context).unwrap();
            let energy = kept_energy(&*map, all[at], dim, rank as usize);
            assert!(energy > last && energy < 1.0 + 1e-6, "{energy}");
            last = energy;
        }
        assert!((last - 1.0).abs() < 1e-6);
        let map = built("svd", &[("rank", 4)], &context).unwrap();
        let own = kept_energy(&*map, all[at], dim, 4);
        for other in (0..3).filter(|&o| o != at) {
            assert!(own > 0.8);
            assert!((kept_energy(&*map, all[other], dim, 4) - own).abs() > 1e-9);
        }
        // Power iteration, which shares no code with the solver, finds the same first direction.
        let mut v = vec![1.0f64; dim];
        for _ in 0..2000 {
            let w: Vec<f64> = (0..dim)
                .map(|i| (0..dim).map(|j| all[at][i * dim + j] * v[j]).sum())
                .collect();
            let norm = w.iter().map(|x| x * x).sum::<f64>().sqrt();
            v = w.iter().map(|x| x / norm).collect();
        }
        let b = column(&*map, (0, 0), dim, (4, 0));
        let cosine: f64 = v.iter().zip(&b).map(|(x, &y)| x * f64::from(y)).sum();
        assert!((cosine.abs() - 1.0).abs() < 1e-6, "{cosine}");
    }
}

#[test]
fn svd_bases_are_orthonormal_with_a_fixed_sign_and_one_per_head() {
    let (dim, rank) = (20, 7);
    let (g, cal) = (geometry(dim), calibration(dim));
    let map = built("svd", &[("rank", 7)], &context(&g, Some(&cal))).unwrap();
    let columns = |at| -> Vec<Vec<f32>> {
        (0..rank)
            .map(|r| column(&*map, at, dim, (rank, r)))
            .collect()
    };
    for at in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let basis = columns(at);
        for (i, a) in basis.iter().enumerate() {
            for (j, b) in basis.iter().enumerate() {
                let want = if i == j { 1.0 } else { 0.0 };
                assert!((dot(a, b) - want).abs() < 1e-6);
            }
            let largest = a
                .iter()
                .fold(0.0f32, |m, &x| if x.abs() > m.abs() { x } else { m });
            assert!(largest > 0.0);
        }
    }
    assert_ne!(columns((0, 0)), columns((0, 1)));
    assert_ne!(columns((0, 0)), columns((1, 0)));
    let scalars = N_LAYERS * N_KV_HEADS * dim * rank;
    assert_eq!(map.weight_bytes(), 4 * scalars as u64);
    assert_eq!(map.output_dim(dim), rank);
}

#[test]
fn svd_projects_orthogonally_and_absorbs_what_it_expands() {
    for (dim, rank) in [(20, 7), (33, 16), (64, 40), (80, 80)] {
        let (g, cal) = (geometry(dim), calibration(dim));
        let map = built("svd", &[("rank", rank as i64)], &context(&g, Some(&cal))).unwrap();
        let (x, q) = (noise(dim, 5), noise(dim, 6));
        let [mut z, mut q_z, mut again] = [vec![9.0; rank], vec![9.0; rank], vec![9.0; rank]];
        let mut back = vec![9.0; dim];
        map.forward(1, 0, &x, &mut z);
        map.expand(1, 0, &z, &mut back);
        map.absorb(1, 0, &q, &mut q_z);
        map.forward(1, 0, &back, &mut again);
        assert!((dot(&q_z, &z) - dot(&q, &back)).abs() < 1e-5);
        assert!(distance(&z, &again) < 1e-5);
        let lost = distance(&x, &back) / dot(&x, &x).sqrt();
        if rank == dim {
            assert!(lost > 0.0 && lost < 1e-6, "{lost}");
        } else {
            assert!(lost > 0.1 && lost < 1.0, "{lost}");
        }
    }
}

#[test]
fn svd_refuses_what_it_cannot_build() {
    let (g, cal) = (geometry(8), calibration(8));
    let full = context(&g, Some(&cal));
    let message = refusal(built("svd", &[], &full));
    assert!(message.contains("`rank` is missing"), "{message}");
    let message = refusal(built("svd", &[("rank", 9)], &full));
    assert!(
        message.contains("layer 0 has head_dim 8: give 1 to 8"),
        "{message}"
    );
    let none = built("svd", &[("rank", 4)], &context(&g, None));
    assert!(matches!(none, Err(StageError::NoCalibration { .. })));
    let mut short = cal.clone();
    short.heads.pop();
    let message = refusal(built("svd", &[("rank", 4)], &context(&g, Some(&short))));
    assert!(
        message.contains("covers 1 layers, the model has 2"),
        "{message}"
    );
    let mut short = cal.clone();
    short.heads[1].pop();
    let message = refusal(built("svd", &[("rank", 4)], &context(&g, Some(&short))));
    assert!(message.contains("1 KV heads of layer 1"), "{message}");
    let mut bad = cal.clone();
    bad.heads[1][0].k_post[5] = f64::NAN;
    let message = refusal(built("svd", &[("rank", 4)], &context(&g, Some(&bad))));
    assert!(
        message.contains("layer 1, KV head 0") && message.contains("not finite"),
        "{message}"
    );
    let mut wide = cal;
    wide.heads[0][1].k_post = covariance(9, 1);
    let message = refusal(built("svd", &[("rank", 4)], &context(&g, Some(&wide))));
    assert!(
        message.contains("81 numbers, head_dim 8 asks for 64"),
        "{message}"
    );
}
