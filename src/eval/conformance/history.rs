//! Histories: forks, truncations, and the compression point.

use super::Context;
use super::failure::{Scene, Stop, Verdict};
use super::rig::{Rig, admit, stored};
use crate::cache::{Admission, CacheError, Continuation, KvCache, SeqId};

const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);

/// A fork goes on as the original would, whatever the other does, and leaves no bytes behind.
pub fn fork(c: &Context<'_>) -> Verdict {
    let rig = &c.rig;
    let n = 260;
    let (script, other) = (rig.script(n, 11), rig.script(n, 12));
    for at in [1, 127, 128, 150] {
        let tokens = format!("{n} tokens, forked after {at}");
        let scene = |what| Scene {
            first: at,
            ..rig.scene(what, &tokens)
        };
        let refused = |e: CacheError| scene("forking").refused(&e);
        let mut cache = rig.cache()?;
        admit(rig, cache.as_mut(), A)?;
        rig.resume(cache.as_mut(), A, &script, 0..at, &[50])?;
        cache.fork(A, B).map_err(refused)?;
        // The fork goes another way first; then the original goes on.
        let fork = rig.resume(cache.as_mut(), B, &other, at..n, &[30])?;
        let got = rig.resume(cache.as_mut(), A, &script, at..n, &[30])?;
        let mut alone = rig.cache()?;
        let want = continued(rig, alone.as_mut(), (&script, &script), (at, n))?;
        scene("the original beside its fork against it alone").same_bits(&got, &want)?;
        let mut elsewhere = rig.cache()?;
        let want = continued(rig, elsewhere.as_mut(), (&script, &other), (at, n))?;
        scene("a fork against a sequence of its own").same_bits(&fork, &want)?;
        cache.release(B).map_err(refused)?;
        let what = scene("what is stored once the fork is released");
        what.same(stored(&cache.memory()), stored(&alone.memory()))?;
    }
    Ok(None)
}

/// The first `at` tokens of one script, then those of another up to `n`: the latter's outputs.
fn continued(
    rig: &Rig<'_>,
    cache: &mut dyn KvCache,
    (first, then): (&super::fixture::Script, &super::fixture::Script),
    (at, n): (usize, usize),
) -> Result<super::rig::Outputs, Stop> {
    admit(rig, cache, A)?;
    rig.resume(cache, A, first, 0..at, &[50])?;
    rig.resume(cache, A, then, at..n, &[30])
}

/// Truncation equals never having appended, or names the earliest length that can be reached, which then can.
pub fn truncation(c: &Context<'_>) -> Verdict {
    let rig = &c.rig;
    let n = 300;
    let script = rig.script(n, 13);
    let mut irreversible = Vec::new();
    for asked in [0u32, 1, 127, 128, 200, 290] {
        let tokens = format!("{n} tokens in chunks of [100], then back to {asked}");
        let scene = rig.scene("truncation", &tokens);
        let (mut cache, _) = rig.fresh_run(&script, &[100])?;
        let to = match cache.truncate(A, asked) {
            Ok(()) => asked,
            Err(CacheError::Irreversible { earliest, .. }) => {
                if c.reaches_any_length() {
                    return Err(scene.failed(
                        format!("refused, {earliest} is the earliest length"),
                        "any length: each row is coded alone at once, and none leaves",
                    ));
                }
                if earliest <= asked || earliest > n as u32 {
                    let expected = format!("a length from {} to {n}", asked + 1);
                    return Err(scene.failed(format!("earliest = {earliest}"), expected));
                }
                cache.truncate(A, earliest).map_err(|e| scene.refused(&e))?;
                irreversible.push(asked);
                earliest
            }
            Err(e) => return Err(scene.refused(&e)),
        };
        let tokens = format!("{n} tokens in chunks of [100], back to {to}, on in chunks of [33]");
        let scene = |what| Scene {
            first: to as usize,
            ..rig.scene(what, &tokens)
        };
        scene("length after truncation").same(cache.len(A).ok(), Some(to))?;
        let mut fresh = rig.cache()?;
        admit(rig, fresh.as_mut(), A)?;
        rig.resume(fresh.as_mut(), A, &script, 0..to as usize, &[100])?;
        scene("what is stored after truncation")
            .same(stored(&cache.memory()), stored(&fresh.memory()))?;
        let got = rig.resume(cache.as_mut(), A, &script, to as usize..n, &[33])?;
        let want = rig.resume(fresh.as_mut(), A, &script, to as usize..n, &[33])?;
        scene("a truncated sequence against one that never went on").same_bits(&got, &want)?;
    }
    let note = format!(
        "irreversible from {n} tokens to {irreversible:?}: the earliest length is named and reached"
    );
    Ok((!irreversible.is_empty()).then_some(note))
}

/// A context compressed once is the same whatever its chunks were, and so is what follows it.
pub fn compression_point(c: &Context<'_>) -> Verdict {
    let rig = &c.rig;
    let (context, n) = (200, 260);
    let script = rig.script(n, 14);
    for continuation in [Continuation::Exact, Continuation::Strategy] {
        let mut first = None;
        for chunks in [&[context][..], &[64], &[7, 13, 20]] {
            let tokens = format!(
                "a context of {context} tokens in chunks of {chunks:?}, then 60 tokens, {continuation:?}"
            );
            let scene = |what| Scene {
                first: context,
                ..rig.scene(what, &tokens)
            };
            let refused = |e: CacheError| scene("the compression point").refused(&e);
            let mut cache = rig.cache()?;
            cache.admit(A, Admission::Context).map_err(refused)?;
            rig.resume(cache.as_mut(), A, &script, 0..context, chunks)?;
            let live = cache.memory().rows_live;
            let all = context as u64 * rig.n_tables();
            scene("rows that live before the compression point").same(live, all)?;
            rig.show(cache.as_mut(), A, &script, context)
                .map_err(refused)?;
            cache.compress(A, continuation).map_err(refused)?;
            let m = cache.memory();
            if m.rows_live == 0 {
                let what = scene("rows that live after the compression point");
                return Err(what.failed(0, "at least one per layer and head"));
            }
            let bytes = stored(&m);
            let out = rig.resume(cache.as_mut(), A, &script, context..n, chunks)?;
            match &first {
                None => first = Some((bytes, out)),
                Some((want_bytes, want)) => {
                    scene("bytes after the compression point").same(bytes, *want_bytes)?;
                    scene("outputs after it, by the context's chunks").same_bits(&out, want)?;
                }
            }
        }
    }
    Ok(None)
}
