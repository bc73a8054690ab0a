//! Outputs that must not change: by later tokens, chunks, neighbours in a batch, threads, repetition or another memory.

use std::sync::Arc;

use super::Context;
use super::failure::{Stop, Verdict};
use super::fixture::Script;
use super::rig::{Rig, admit, batch_step, stored};
use super::store::NoSlices;
use crate::cache::SeqId;
use crate::cache::pages::HostStore;

/// No query profits from later tokens.
pub fn causality(c: &Context<'_>) -> Verdict {
    let rig = &c.rig;
    const N: usize = 200;
    let script = rig.script(N, 1);
    for changed_from in [1, 120, 128] {
        let other = changed(rig, &script, changed_from);
        for chunks in [&[N][..], &[50], &[1]] {
            let tokens = format!(
                "{N} tokens in chunks of {chunks:?}, K and V of tokens {changed_from} and later changed"
            );
            let scene = rig.scene("outputs before the change, with and without it", &tokens);
            let (_, mut a) = rig.fresh_run(&script, chunks)?;
            let (_, mut b) = rig.fresh_run(&other, chunks)?;
            let mut reached = false;
            for (g, (a, b)) in rig.geometry.layers.iter().zip(a.iter_mut().zip(&mut b)) {
                let at = changed_from * g.n_heads * g.head_dim;
                reached |= a.split_off(at) != b.split_off(at);
            }
            scene.same_bits(&b, &a)?;
            if !reached {
                return Err(scene.failed("the same outputs after the change, too", "others"));
            }
        }
    }
    Ok(None)
}

fn changed(rig: &Rig<'_>, script: &Script, from: usize) -> Script {
    let mut other = script.clone();
    for (l, g) in rig.geometry.layers.iter().enumerate() {
        let at = from * g.n_kv_heads * g.head_dim;
        other.k[l][at..].iter_mut().for_each(|x| *x *= -3.0);
        other.v[l][at..].iter_mut().for_each(|x| *x += 1.0);
    }
    other
}

/// Any chunks give the bits of decoding token by token, and store the same bytes.
pub fn chunking(c: &Context<'_>) -> Verdict {
    let mut left_out = None;
    for rig in [Ok(&c.rig), c.windowed.as_ref()] {
        let Ok(rig) = rig else {
            left_out = c
                .windowed
                .as_ref()
                .err()
                .map(|e| format!("not with a sliding window: {e}"));
            continue;
        };
        let script = rig.script(290, 2);
        let (one, want) = rig.fresh_run(&script, &[1])?;
        for chunks in [&[290][..], &[7, 13, 20], &[64, 1]] {
            let tokens = format!("290 tokens in chunks of {chunks:?}");
            let (cache, got) = rig.fresh_run(&script, chunks)?;
            rig.scene("chunks against token by token", &tokens)
                .same_bits(&got, &want)?;
            let scene = rig.scene(
                "what is stored after chunks and after token by token",
                &tokens,
            );
            scene.same(stored(&cache.memory()), stored(&one.memory()))?;
        }
    }
    Ok(left_out)
}

/// A sequence in a ragged batch, beside ones that join late, leave early or are a thousand times as large, is as alone.
pub fn batching(c: &Context<'_>) -> Verdict {
    let rig = &c.rig;
    let scripts = [
        rig.script(3, 3),
        rig.scaled_script(140, 4, 500.0),
        rig.script(40, 5),
        rig.script(150, 6),
    ];
    let mut cache = rig.cache()?;
    for i in 0..scripts.len() as u32 {
        admit(rig, cache.as_mut(), SeqId(i))?;
    }
    let n_layers = rig.geometry.layers.len();
    let mut got = vec![vec![Vec::new(); n_layers]; scripts.len()];
    let mut at = vec![0usize; scripts.len()];
    for round in 0.. {
        let mut members = Vec::new();
        for (i, script) in scripts.iter().enumerate() {
            // The third joins later than the others.
            let asked = (5 + 3 * i).min(script.n_tokens - at[i]);
            if asked == 0 || i == 2 && round < 2 {
                continue;
            }
            let n = cache.step_limit(SeqId(i as u32), asked).clamp(1, asked);
            members.push((SeqId(i as u32), script, at[i]..at[i] + n));
            at[i] += n;
        }
        if members.is_empty() {
            break;
        }
        let scene = rig.scene("a step of several sequences", "3, 140, 40 and 150 tokens");
        let outs = batch_step(cache.as_mut(), &rig.geometry, &members);
        let outs = outs.map_err(|e| scene.refused(&e))?;
        for (l, (g, out)) in rig.geometry.layers.iter().zip(outs).enumerate() {
            let mut first = 0;
            for (seq, _, range) in &members {
                let n = range.len() * g.n_heads * g.head_dim;
                got[seq.0 as usize][l].extend_from_slice(&out[first..first + n]);
                first += n;
            }
        }
        if at[0] == scripts[0].n_tokens && members[0].0 == SeqId(0) {
            let left = cache.release(SeqId(0));
            left.map_err(|e| scene.refused(&e))?;
        }
    }
    for (i, script) in scripts.iter().enumerate() {
        let (_, want) = rig.fresh_run(script, &[script.n_tokens])?;
        let tokens = format!("sequence {i} of 3, 140 (large), 40 and 150 tokens");
        rig.scene("a sequence in a ragged batch against it alone", &tokens)
            .same_bits(&got[i], &want)?;
    }
    Ok(None)
}

/// The same again gives the same: from the same stages, and from new ones on one, two or three threads.
pub fn determinism(c: &Context<'_>) -> Verdict {
    let rig = &c.rig;
    let script = rig.script(200, 7);
    let (_, want) = rig.fresh_run(&script, &[50])?;
    let (_, got) = rig.fresh_run(&script, &[50])?;
    rig.scene("the same again", "200 tokens in chunks of [50]")
        .same_bits(&got, &want)?;
    for n_threads in [1, 2, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads);
        let Ok(pool) = pool.build() else {
            return Err(Stop::NotApplicable("no threads to be had".to_owned()));
        };
        let got = pool.install(|| {
            let stages = Arc::new(rig.rebuilt()?);
            let mut cache = rig.cache_over(stages, Box::new(HostStore::default()))?;
            rig.run(cache.as_mut(), SeqId(0), &script, &[50])
        })?;
        let tokens = format!("200 tokens in chunks of [50], {n_threads} threads");
        rig.scene("the same again, stages built anew", &tokens)
            .same_bits(&got, &want)?;
    }
    Ok(None)
}

/// A memory that hands out no slices, as a device's does not, gives the same bits.
pub fn device(c: &Context<'_>) -> Verdict {
    let rig = &c.rig;
    let script = rig.script(200, 8);
    let (_, want) = rig.fresh_run(&script, &[70])?;
    let mut cache = rig.cache_over(Arc::clone(&rig.stages), Box::<NoSlices>::default())?;
    let got = rig.run(cache.as_mut(), SeqId(0), &script, &[70])?;
    rig.scene(
        "a memory without host slices against host memory",
        "200 tokens in chunks of [70]",
    )
    .same_bits(&got, &want)?;
    Ok(None)
}
