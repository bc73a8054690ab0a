//! The edges: attention held against the reference, contexts of a few tokens, ties, sizes, rows that are not finite.

use super::Context;
use super::failure::{Scene, Stop, Verdict};
use super::fixture::{Script, geometry};
use super::reference::{Reference, rotated};
use super::rig::{Rig, admit, step};
use crate::cache::{CacheError, KvCache, SeqId};

/// Largest error of attention in f32 against the reference, by the largest output.
const BOUND: f64 = 1e-4;

/// Numbers of query and KV heads of models in use.
const LAYOUTS: [(usize, usize); 3] = [(4, 1), (9, 3), (4, 4)];

/// Channels of a head: whole blocks, parts of blocks, an odd number.
const HEAD_DIMS: [usize; 4] = [20, 33, 64, 80];

/// Attention over decoded rows in f64.
pub fn oracle(c: &Context<'_>) -> Verdict {
    rotation(&c.rig)?;
    let script = c.rig.script(300, 21);
    for chunks in [&[300][..], &[1]] {
        against_reference(&c.rig, &script, chunks)?;
    }
    match &c.windowed {
        // What a window drops is not modelled together with what leaves on its own.
        Ok(rig) if rig.stages.retain.is_none() => {
            against_reference(rig, &rig.script(400, 22), &[130, 7])?;
            Ok(None)
        }
        Ok(_) => Ok(Some("not with a sliding window beside eviction".to_owned())),
        Err(e) => Ok(Some(format!("not with a sliding window: {e}"))),
    }
}

/// The rotation that keys go through before they are coded, against one in f64.
fn rotation(rig: &Rig<'_>) -> Result<(), Stop> {
    let g = &rig.geometry.layers[0];
    let script = rig.script(400, 23);
    let scene = rig.scene("a rotated key against its rotation in f64", "400 tokens");
    for p in [0, 1, 127, 399] {
        let mut row = script.k[0][p * g.n_kv_heads * g.head_dim..][..g.head_dim].to_vec();
        let wide: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
        g.rope.rotate(p as u32, &mut row);
        let near = |(a, b): (&f32, f64)| (f64::from(*a) - b).abs() < BOUND;
        if !row.iter().zip(rotated(&wide, p)).all(near) {
            return Err(scene.failed(format!("{row:?}"), format!("{:?}", rotated(&wide, p))));
        }
    }
    Ok(())
}

fn against_reference(rig: &Rig<'_>, script: &Script, chunks: &[usize]) -> Result<(), Stop> {
    let reference = Reference::new(rig)?;
    let (_, got) = rig.fresh_run(script, chunks)?;
    let tokens = format!("{} tokens in chunks of {chunks:?}", script.n_tokens);
    let scene = rig.scene("attention against that over decoded rows in f64", &tokens);
    for (layer, got) in got.iter().enumerate() {
        let want = reference.attention(script, layer);
        let largest = want.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
        scene.close(layer, got, &want, BOUND * largest)?;
    }
    Ok(())
}

/// Every layout of heads and number of channels that the strategy takes.
pub fn shapes(c: &Context<'_>) -> Verdict {
    let mut refused = Vec::new();
    for (n_heads, n_kv_heads) in LAYOUTS {
        for head_dim in HEAD_DIMS {
            let g = geometry(n_heads, n_kv_heads, head_dim);
            let rig = match Rig::new(c.rig.subject, g, c.rig.seed) {
                Ok(rig) => rig,
                Err(e) => {
                    let reason = format!("head_dim {head_dim}: {e}");
                    if !refused.contains(&reason) {
                        refused.push(reason);
                    }
                    continue;
                }
            };
            let script = rig.script(150, 24);
            let (_, want) = rig.fresh_run(&script, &[1])?;
            let (_, got) = rig.fresh_run(&script, &[90, 60])?;
            let tokens = "150 tokens in chunks of [90, 60]";
            let scene = rig.scene("chunks against token by token", tokens);
            scene.same_bits(&got, &want)?;
            all_finite(&scene, &got)?;
            match against_reference(&rig, &script, &[150]) {
                Err(Stop::NotApplicable(_)) => {}
                other => other?,
            }
        }
    }
    Ok((!refused.is_empty()).then(|| format!("refuses {}", refused.join("; "))))
}

/// One, two, three tokens, and lengths around a page.
pub fn short(c: &Context<'_>) -> Verdict {
    let rig = &c.rig;
    for n in [1, 2, 3, 127, 128, 129] {
        let script = rig.script(n, 25);
        let (_, want) = rig.fresh_run(&script, &[1])?;
        let (cache, got) = rig.fresh_run(&script, &[n])?;
        let tokens = format!("{n} tokens");
        let scene = rig.scene("a short context at once against token by token", &tokens);
        scene.same_bits(&got, &want)?;
        all_finite(&scene, &got)?;
        let live = cache.memory().rows_live;
        if live < rig.n_tables() {
            let expected = format!("at least one per layer and KV head: {}", rig.n_tables());
            let scene = rig.scene("rows that live", &tokens);
            return Err(scene.failed(live, expected));
        }
        match against_reference(rig, &script, &[n]) {
            Err(Stop::NotApplicable(_)) => {}
            other => other?,
        }
    }
    Ok(None)
}

/// Rows that are all the same, all zero, tiny or far apart: finite outputs, the same in any chunks.
pub fn ties(c: &Context<'_>) -> Verdict {
    let rig = &c.rig;
    const N: usize = 200;
    let fill = |value: f32| {
        let mut script = rig.script(N, 26);
        for x in script.k.iter_mut().chain(&mut script.v) {
            x.fill(value);
        }
        script
    };
    let mut twice = rig.script(N, 27);
    for (l, g) in rig.geometry.layers.iter().enumerate() {
        let width = g.n_kv_heads * g.head_dim;
        for side in [&mut twice.k[l], &mut twice.v[l]] {
            let (first, second) = side.split_at_mut(N / 2 * width);
            second.copy_from_slice(first);
        }
    }
    let scripts = [
        ("all rows 0", fill(0.0)),
        ("all channels of all rows 1", fill(1.0)),
        ("every row twice, 100 tokens apart", twice),
        ("rows of about 1e-20", rig.scaled_script(N, 28, 1e-20)),
        ("scores a thousand apart", rig.scaled_script(N, 29, 40.0)),
    ];
    for (name, script) in &scripts {
        let tokens = format!("{N} tokens: {name}");
        let (one, want) = rig.fresh_run(script, &[1])?;
        let (cache, got) = rig.fresh_run(script, &[90, 37])?;
        let scene = rig.scene("rows that tie, in chunks against token by token", &tokens);
        all_finite(&scene, &want)?;
        scene.same_bits(&got, &want)?;
        let scene = rig.scene("rows that live", &tokens);
        scene.same(cache.memory().rows_live, one.memory().rows_live)?;
    }
    // Equal values come back as their decoded selves, whatever the weights.
    for (name, script) in &scripts[..2] {
        let (_, got) = rig.fresh_run(script, &[N])?;
        let tokens = format!("{N} tokens in chunks of [{N}]: {name}");
        match Reference::new(rig) {
            Err(Stop::NotApplicable(_)) => break,
            Err(stop) => return Err(stop),
            Ok(reference) => {
                let scene = rig.scene("attention against that over decoded rows in f64", &tokens);
                for (layer, got) in got.iter().enumerate() {
                    scene.close(layer, got, &reference.attention(script, layer), BOUND)?;
                }
            }
        }
    }
    Ok(None)
}

fn all_finite(scene: &Scene<'_>, outputs: &[Vec<f32>]) -> Result<(), Stop> {
    let finite = |out: &Vec<f32>| -> Vec<f32> {
        let zeroed = |&x: &f32| if x.is_finite() { x } else { 0.0 };
        out.iter().map(zeroed).collect()
    };
    let expected: Vec<Vec<f32>> = outputs.iter().map(finite).collect();
    let scene = Scene {
        what: &format!("{}: finite outputs (0 stands for any number)", scene.what),
        ..*scene
    };
    scene.same_bits(outputs, &expected)
}

/// NaN and infinities in K and V are refused by layer, head and position, and hurt no other sequence.
pub fn non_finite(c: &Context<'_>) -> Verdict {
    let rig = &c.rig;
    let good = rig.script(20, 30);
    let (_, want) = rig.fresh_run(&good, &[20])?;
    let last = rig.geometry.layers.len() - 1;
    let g = &rig.geometry.layers[last];
    let places = [(0, 0, 0, 0), (last, g.n_kv_heads - 1, 7, g.head_dim - 1)];
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for side in ["K", "V"] {
            for (layer, head, position, channel) in places {
                let mut bad = rig.script(20, 31);
                let rows = if side == "K" { &mut bad.k } else { &mut bad.v };
                rows[layer][(position * g.n_kv_heads + head) * g.head_dim + channel] = value;
                let tokens = format!(
                    "20 tokens, {value} in {side} at layer {layer}, KV head {head}, position {position}, channel {channel}"
                );
                let mut cache = rig.cache()?;
                admit(rig, cache.as_mut(), SeqId(0))?;
                admit(rig, cache.as_mut(), SeqId(1))?;
                let chunk = cache.step_limit(SeqId(0), 10).clamp(1, 10);
                let caught = feed(cache.as_mut(), rig, &bad, chunk);
                let scene = rig.scene("a row that is not finite", &tokens);
                let named = |e: &CacheError| matches!(e, CacheError::NonFinite { side: s, layer: l, head: h, position: p } if (*s, *l, *h, *p) == (side, layer, head, position as u32));
                let expected = "an error that names side, layer, KV head and position";
                match caught {
                    Err(e) if named(&e) => {}
                    Err(e) => return Err(scene.failed(e, expected)),
                    Ok(()) => return Err(scene.failed("no error", expected)),
                }
                // The sequence is lost; the others go on as if nothing had been.
                let released = cache.release(SeqId(0));
                released.map_err(|e| scene.refused(&e))?;
                let got = rig.resume(cache.as_mut(), SeqId(1), &good, 0..20, &[20])?;
                rig.scene("another sequence after a row that is not finite", &tokens)
                    .same_bits(&got, &want)?;
            }
        }
    }
    Ok(None)
}

fn feed(
    cache: &mut dyn KvCache,
    rig: &Rig<'_>,
    script: &Script,
    chunk: usize,
) -> Result<(), CacheError> {
    for at in (0..script.n_tokens).step_by(chunk) {
        let end = script.n_tokens.min(at + chunk);
        step(cache, &rig.geometry, SeqId(0), script, at..end)?;
    }
    Ok(())
}
