//! What it takes to read scattered sectors past the page cache, as `specache` does of a file: reads at offsets (`pread`) by threads, a
//! map of the file, `io_uring`: `cargo bench --bench random_reads`.
//!
//! Each turn reads sectors that no turn has read before, so that none is in the page cache: the file is written past it, and a
//! map that is told to expect random reads brings in no neighbours. Each sector holds its number, which is checked. Ways take
//! turns; a ratio is of two times of the same round. Directory: TMPDIR.

#[cfg(target_os = "linux")]
fn main() -> std::io::Result<()> {
    linux::main()
}

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("io_uring and O_DIRECT are Linux's: nothing to compare here");
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{FileExt, OpenOptionsExt};

    use io_uring::{IoUring, opcode, types};
    use kvlab::engine::clock::{Clock, SystemClock};
    use memmap2::{Advice, Mmap};
    use rand::SeedableRng;
    use rand::seq::SliceRandom;
    use rand_chacha::ChaCha8Rng;

    const SECTOR: usize = 4096;
    const N_READS: usize = 3000;
    const N_ROUNDS: usize = 7;
    /// The vault's own number comes first.
    const N_THREADS: [usize; 3] = [8, 64, 1];
    /// Reads in flight.
    const DEPTHS: [u32; 2] = [8, 64];

    type Way<'a> = (String, Box<dyn Fn(&[u64]) -> io::Result<u64> + 'a>);

    /// Whole sectors in memory that starts at a sector's multiple.
    struct Room {
        bytes: Vec<u8>,
        first: usize,
    }

    impl Room {
        fn new(n_sectors: usize) -> Self {
            let bytes = vec![0; (n_sectors + 1) * SECTOR];
            let first = bytes.as_ptr().align_offset(SECTOR);
            Self { bytes, first }
        }

        fn sectors(&mut self) -> &mut [u8] {
            let end = self.bytes.len() - SECTOR + self.first;
            &mut self.bytes[self.first..end]
        }
    }

    pub fn main() -> io::Result<()> {
        let path = tempfile::NamedTempFile::new()?.into_temp_path();
        let mut options = File::options();
        let direct = options
            .read(true)
            .write(true)
            .custom_flags(libc::O_DIRECT)
            .open(&path)?;
        let plain = File::open(&path)?;
        // SAFETY: a mmap of a file of our own that nobody writes to or cuts while it is mapped: `write` is done before it is read.
        let map = || unsafe { Mmap::map(&plain) };
        let n_ways = 2 * N_THREADS.len() + DEPTHS.len();
        let mut order: Vec<u64> = (0..(n_ways * N_ROUNDS * N_READS) as u64).collect();
        write(&direct, order.len())?;
        let map = map()?;
        map.advise(Advice::Random)?;
        order.shuffle(&mut ChaCha8Rng::seed_from_u64(1));
        let mut turns = order.chunks_exact(N_READS);

        let mut ways: Vec<Way<'_>> = Vec::new();
        let (direct, map) = (&direct, &map);
        for n_threads in N_THREADS {
            let read = move |sectors: &[u64]| shared(sectors, n_threads, |s| by_pread(direct, s));
            ways.push((threads("pread", n_threads), Box::new(read)));
            let read = move |sectors: &[u64]| shared(sectors, n_threads, |s| Ok(by_map(map, s)));
            ways.push((threads("mmap", n_threads), Box::new(read)));
        }
        for depth in DEPTHS {
            let read = move |sectors: &[u64]| by_ring(direct, sectors, depth);
            ways.push((format!("io_uring, {depth} in flight"), Box::new(read)));
        }
        let clock = SystemClock::new();
        let mut times = vec![Vec::new(); n_ways];
        for _ in 0..N_ROUNDS {
            for ((name, read), times) in ways.iter().zip(&mut times) {
                let sectors = turns.next().unwrap_or_default();
                let start = clock.read();
                let sum = read(sectors)?;
                let spent = clock.read().since(start);
                assert_eq!(sum, sectors.iter().sum::<u64>(), "{name} read other bytes");
                times.push((spent.wall_ms(), spent.cpu_ms()));
            }
        }
        println!("{N_READS} sectors of {SECTOR} bytes, medians of {N_ROUNDS} rounds");
        println!(
            "{:<24}{:>10}{:>10}{:>16}",
            "", "ms", "CPU ms", "over the first"
        );
        for ((name, _), own) in ways.iter().zip(&times) {
            let ratios = own.iter().zip(&times[0]).map(|(a, b)| a.0 / b.0);
            let (wall, cpu) = (
                median(own.iter().map(|t| t.0)),
                median(own.iter().map(|t| t.1)),
            );
            println!("{name:<24}{wall:>10.1}{cpu:>10.1}{:>16.2}", median(ratios));
        }
        Ok(())
    }

    fn threads(name: &str, n: usize) -> String {
        format!("{name}, {n} thread{}", if n == 1 { "" } else { "s" })
    }

    fn median(values: impl Iterator<Item = f64>) -> f64 {
        let mut all: Vec<f64> = values.collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    }

    /// Each sector begins with its number.
    fn write(file: &File, n_sectors: usize) -> io::Result<()> {
        const AT_ONCE: usize = 256;
        let mut room = Room::new(AT_ONCE);
        for first in (0..n_sectors).step_by(AT_ONCE) {
            for (sector, number) in room.sectors().chunks_exact_mut(SECTOR).zip(first as u64..) {
                sector[..8].copy_from_slice(&number.to_le_bytes());
            }
            file.write_all_at(room.sectors(), (first * SECTOR) as u64)?;
        }
        file.sync_all()
    }

    fn number(sector: &[u8]) -> u64 {
        sector[..8]
            .iter()
            .rev()
            .fold(0, |n, &b| n << 8 | u64::from(b))
    }

    /// A share of the sectors for each thread; the sum of all numbers.
    fn shared(
        sectors: &[u64],
        n_threads: usize,
        read: impl Fn(&[u64]) -> io::Result<u64> + Sync,
    ) -> io::Result<u64> {
        std::thread::scope(|scope| {
            let share = sectors.len().div_ceil(n_threads);
            let parts = sectors.chunks(share);
            let all: Vec<_> = parts.map(|part| scope.spawn(|| read(part))).collect();
            let ended = all.into_iter().map(|t| t.join().expect("a reader ends"));
            ended.sum()
        })
    }

    fn by_pread(file: &File, sectors: &[u64]) -> io::Result<u64> {
        let mut room = Room::new(1);
        let mut sum = 0;
        for s in sectors {
            file.read_exact_at(room.sectors(), s * SECTOR as u64)?;
            sum += number(room.sectors());
        }
        Ok(sum)
    }

    fn by_map(map: &Mmap, sectors: &[u64]) -> u64 {
        let first = |&s: &u64| number(&map[s as usize * SECTOR..]);
        sectors.iter().map(first).sum()
    }

    fn by_ring(file: &File, sectors: &[u64], depth: u32) -> io::Result<u64> {
        // Before the ring: they must be there as long as it is.
        let mut rooms: Vec<Room> = (0..depth).map(|_| Room::new(1)).collect();
        let mut ring = IoUring::new(depth)?;
        let mut free: Vec<usize> = (0..rooms.len()).collect();
        let mut left = sectors.iter();
        let mut sum = 0;
        loop {
            while let (Some(&room), false) = (free.last(), left.as_slice().is_empty()) {
                let Some(s) = left.next() else { break };
                let to = rooms[room].sectors().as_mut_ptr();
                let read = opcode::Read::new(types::Fd(file.as_raw_fd()), to, SECTOR as u32);
                let read = read.offset(s * SECTOR as u64).build();
                // SAFETY: the room outlives the ring and is given out again only once this read is done.
                let pushed = unsafe { ring.submission().push(&read.user_data(room as u64)) };
                pushed.map_err(io::Error::other)?;
                free.pop();
            }
            if free.len() == rooms.len() {
                return Ok(sum);
            }
            ring.submit_and_wait(1)?;
            for done in ring.completion() {
                let room = done.user_data() as usize;
                if done.result() != SECTOR as i32 {
                    return Err(io::Error::from_raw_os_error(-done.result()));
                }
                sum += number(rooms[room].sectors());
                free.push(room);
            }
        }
    }
}
