//! Pages in and out of the file: exact, reused, and with an error that says what happened when that fails.

use super::*;
use crate::cache::stage::{KeyForm, Side};
use crate::cache::{CacheError, Geometry};

fn opened() -> Box<dyn Backing> {
    FilePlacement { dir: None }.open().unwrap()
}

fn page(n: usize, seed: u8) -> Vec<u8> {
    (0..n).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect()
}

fn fetched(backing: &dyn Backing, slot: Slot, n: usize) -> Result<Vec<u8>, CacheError> {
    let mut out = vec![0; n];
    backing.fetch(slot, &mut out)?;
    Ok(out)
}

fn build_in(dir: PathBuf) -> Result<Arc<dyn Placement>, StageError> {
    let context = BuildContext {
        geometry: &Geometry { layers: Vec::new() },
        keys: KeyForm::PostRope,
        side: Side::K,
        calibration: None,
        backing_dir: Some(&dir),
        head: None,
    };
    match (DEF.build)(&Params::default(), &context)? {
        Stage::Place(placement) => Ok(placement),
        _ => panic!("not a placement"),
    }
}

#[test]
fn pages_of_all_sizes_come_back_exactly() {
    for n in [1, 127, 128, 129] {
        let mut backing = opened();
        let pages: Vec<_> = (0..n).map(|i| page(i * 37 % 5000, i as u8)).collect();
        let slots: Vec<_> = pages.iter().map(|p| backing.park(p).unwrap()).collect();
        backing.prefetch(&slots);
        for (p, &slot) in pages.iter().zip(&slots).rev() {
            assert_eq!(&fetched(&*backing, slot, p.len()).unwrap(), p);
        }
        let total: usize = pages.iter().map(Vec::len).sum();
        assert_eq!(backing.bytes(), total as u64);
        for slot in slots {
            backing.discard(slot);
        }
        assert_eq!(backing.bytes(), 0);
    }
}

#[test]
fn freed_room_is_used_again_and_stale_slots_are_noticed() {
    let mut backing = opened();
    let first = backing.park(&page(100, 1)).unwrap();
    let second = backing.park(&page(100, 2)).unwrap();
    backing.discard(first);
    let third = backing.park(&page(60, 3)).unwrap();
    let fourth = backing.park(&page(40, 4)).unwrap();
    assert_eq!(fetched(&*backing, second, 100).unwrap(), page(100, 2));
    assert_eq!(fetched(&*backing, third, 60).unwrap(), page(60, 3));
    assert_eq!(fetched(&*backing, fourth, 40).unwrap(), page(40, 4));
    assert_eq!(backing.bytes(), 200);
    let stale = fetched(&*backing, first, 100).unwrap_err().to_string();
    assert!(stale.contains("slot 0 holds no page"), "{stale}");
    backing.discard(first);
    assert_eq!(backing.bytes(), 200);
    let short = fetched(&*backing, second, 99).unwrap_err().to_string();
    assert!(
        short.contains("holds 100 bytes, 99 were asked for"),
        "{short}"
    );
}

#[test]
fn readers_share_the_file() {
    let mut backing = opened();
    let slots: Vec<_> = (0..64)
        .map(|i| backing.park(&page(4096, i)).unwrap())
        .collect();
    let backing = &*backing;
    std::thread::scope(|scope| {
        for t in 0..4 {
            let slots = &slots;
            scope.spawn(move || {
                for i in (0..64).rev().chain(t..64) {
                    let got = fetched(backing, slots[i], 4096).unwrap();
                    assert_eq!(got, page(4096, i as u8));
                }
            });
        }
    });
}

#[test]
fn a_changed_byte_or_a_cut_file_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages");
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    let mut backing = FileBacking {
        file: PageFile::new(file),
        dir: dir.path().to_owned(),
        extents: Extents::default(),
        pages: BTreeMap::new(),
        next_slot: 0,
        live_bytes: 0,
    };
    let bytes = page(301, 5);
    let slot = backing.park(&bytes).unwrap();
    for at in [0, 8, 150, 300] {
        let mut broken = bytes.clone();
        broken[at] ^= 1;
        std::fs::write(&path, &broken).unwrap();
        let message = fetched(&backing, slot, 301).unwrap_err().to_string();
        assert!(
            message.contains("fetching 301 bytes at 0")
                && message.contains("not the bytes that were parked"),
            "{message}"
        );
    }
    std::fs::write(&path, &bytes[..300]).unwrap();
    assert!(fetched(&backing, slot, 301).is_err());
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(fetched(&backing, slot, 301).unwrap(), bytes);
    // The end of the file is given back with the last page.
    backing.discard(slot);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
}

#[test]
fn the_directory_is_checked_and_left_empty() {
    let dir = tempfile::tempdir().unwrap();
    let placement = build_in(dir.path().to_owned()).unwrap();
    let mut backing = placement.open().unwrap();
    backing.park(&page(1000, 1)).unwrap();
    drop(backing);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    let Err(refused) = build_in(dir.path().join("absent")) else {
        panic!("a missing directory was accepted");
    };
    assert!(
        refused.to_string().contains("absent is not a directory"),
        "{refused}"
    );
    drop(dir);
    let gone = placement.open().err().map(|e| e.to_string()).unwrap();
    assert!(gone.contains("can't make a file in"), "{gone}");
}
