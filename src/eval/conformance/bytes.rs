//! Bytes: what is reported against what is allocated, against the formats' definition, and over a sequence's life.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Context;
use super::failure::{Stop, Verdict};
use super::reference::Reference;
use super::rig::{Rig, admit, stored};
use super::store::Counting;
use crate::cache::{MemoryReport, SeqId};

const SEQ: SeqId = SeqId(0);

/// Lengths at which everything reported is held against everything allocated.
const LENGTHS: [usize; 6] = [1, 2, 100, 128, 200, 300];

/// Reported bytes are those of live buffers and of the formats' definition.
pub fn accounting(c: &Context<'_>) -> Verdict {
    live_buffers(&c.rig)?;
    slope(&c.rig)?;
    end_of_life(&c.rig)?;
    by_definition(&c.rig)
}

/// What lies in pages, as the cache reports it.
fn in_pages(m: &MemoryReport) -> u64 {
    m.payload_bytes + m.scale_bytes + m.exact_bytes + m.slack_bytes
}

fn live_buffers(rig: &Rig<'_>) -> Result<(), Stop> {
    let counting = Counting::default();
    let live = Arc::clone(&counting.live_bytes);
    let mut cache = rig.cache_over(Arc::clone(&rig.stages), Box::new(counting))?;
    let script = rig.script(300, 41);
    admit(rig, cache.as_mut(), SEQ)?;
    let mut at = 0;
    for n in LENGTHS {
        rig.resume(cache.as_mut(), SEQ, &script, at..n, &[37])?;
        at = n;
        let (m, tokens) = (cache.memory(), format!("{n} tokens"));
        let scene = rig.scene(
            "bytes reported in pages against bytes allocated for them",
            &tokens,
        );
        scene.same(in_pages(&m), live.load(Ordering::Relaxed))?;
        if m.stored_bytes() == 0 {
            let scene = rig.scene("bytes stored", &tokens);
            return Err(scene.failed(0, "more than 0"));
        }
        let seen = n as u64 * rig.n_tables();
        rig.scene("rows seen", &tokens).same(m.rows_seen, seen)?;
        if n == 1 {
            rig.scene("rows that live", &tokens)
                .same(m.rows_live, seen)?;
        }
    }
    Ok(())
}

/// Where nothing leaves and nothing is packed, each 128 tokens take the same bytes.
fn slope(rig: &Rig<'_>) -> Result<(), Stop> {
    let s = &rig.stages;
    if s.retain.is_some() || s.pack.is_some() || s.budget.is_some() {
        return Ok(());
    }
    let tail = s.tail.into_iter().max().unwrap_or(0) + s.sinks;
    // Behind tail and sinks, so that all of them are there at the first length already.
    let first = 256 + (tail as usize).next_multiple_of(128);
    let last = first + 256;
    if last > super::fixture::MAX_POSITIONS {
        return Ok(());
    }
    let script = rig.script(last, 42);
    let mut cache = rig.cache()?;
    admit(rig, cache.as_mut(), SEQ)?;
    let (mut at, mut bytes) = (0, Vec::new());
    for n in [first, first + 128, last] {
        rig.resume(cache.as_mut(), SEQ, &script, at..n, &[128])?;
        at = n;
        let m = cache.memory();
        bytes.push(m.payload_bytes + m.scale_bytes + m.exact_bytes + m.backing_bytes);
    }
    let (a, b) = (
        bytes[1] - bytes[0].min(bytes[1]),
        bytes[2] - bytes[1].min(bytes[2]),
    );
    let tokens = format!("{first}, {} and {last} tokens", first + 128);
    let scene = rig.scene(
        "bytes of the last 128 tokens against those of the 128 before",
        &tokens,
    );
    scene.same(b, a)?;
    match a {
        0 => Err(scene.failed(0, "more than 0")),
        _ => Ok(()),
    }
}

/// Going back gives bytes back, and an empty cache holds what it held before.
fn end_of_life(rig: &Rig<'_>) -> Result<(), Stop> {
    let script = rig.script(300, 43);
    let empty = rig.cache()?.memory();
    let (mut cache, _) = rig.fresh_run(&script, &[100])?;
    let full = stored(&cache.memory());
    let scene = rig.scene("what is stored after truncation to 290", "300 tokens");
    if cache.truncate(SEQ, 290).is_ok() {
        let (a, b) = (cache.memory(), full);
        let more = stored(&a).into_iter().zip(b).any(|(a, b)| {
            // Rows go, and with them never more than their own bytes; slack may grow meanwhile.
            a.0 != "slack_bytes" && a.1 > b.1
        });
        if more || a.rows_seen == full[6].1 {
            let expected = format!("fewer rows and no more bytes than {full:?}");
            return Err(scene.failed(format!("{:?}", stored(&a)), expected));
        }
    }
    cache.release(SEQ).map_err(|e| scene.refused(&e))?;
    let scene = rig.scene(
        "what is stored after release against an empty cache",
        "300 tokens",
    );
    let bytes = |m: &MemoryReport| (stored(m), m.index_bytes, m.page_table_bytes);
    scene.same(bytes(&cache.memory()), bytes(&empty))
}

/// Bytes that follow from the formats and from which rows live.
fn by_definition(rig: &Rig<'_>) -> Verdict {
    let s = &rig.stages;
    let reference = match Reference::new(rig) {
        Ok(reference) => reference,
        Err(Stop::NotApplicable(why)) => return Ok(Some(format!("not by definition: {why}"))),
        Err(stop) => return Err(stop),
    };
    let whole = s.pack.is_none() && s.place.is_none();
    for n in LENGTHS {
        let script = rig.script(n, 44);
        let (cache, _) = rig.fresh_run(&script, &[n])?;
        let (m, want) = (cache.memory(), reference.expected(&script));
        let tokens = format!("{n} tokens");
        let scene = rig.scene("rows that live against those worked out", &tokens);
        scene.same(m.rows_live, want.rows_live)?;
        if whole {
            let coded = m.payload_bytes + m.scale_bytes;
            let scene = rig.scene(
                "bytes of coded rows against the format's definition",
                &tokens,
            );
            scene.same(coded, want.coded_bytes)?;
            let scene = rig.scene("bytes of exact rows against their definition", &tokens);
            scene.same(m.exact_bytes, want.exact_bytes)?;
        }
    }
    Ok((!whole).then(|| "coded bytes not by definition: pages are packed or parked".to_owned()))
}
