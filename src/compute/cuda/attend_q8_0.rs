//! Launching `kernels/attend_q8_0.cu`: attention of a decoding step over lists of q8_0 pages.
//!
//! [`Plan`] turns a batch into the tables, offsets and grids of the two launches, and is all that can be wrong before the
//! driver is met; [`AttendQ8_0`] uploads it, launches and downloads. The pages' bytes go up unchanged.

use cudarc::driver::{
    CudaFunction, CudaSlice, DevicePtr, DriverError, LaunchConfig, PushKernelArg,
};

use super::device::during;
use super::{CudaError, Device, KernelSource};

/// The kernel's file.
pub const SOURCE: KernelSource = KernelSource {
    name: "attend_q8_0.cu",
    text: include_str!("../../../kernels/attend_q8_0.cu"),
};

/// Rows of a page at most, and the threads of a block of the first kernel.
pub const PAGE_ROWS: usize = 128;
/// A page is stored in whole granules of so many rows.
pub const GRANULE_ROWS: usize = 16;
/// Values of a row at most: a page must fit in a block's shared memory.
pub const MAX_HEAD_DIM: usize = 256;

const BLOCK_VALUES: usize = 32;
const BLOCK_BYTES: usize = 34;
const PAGE_ALIGNMENT_BYTES: usize = 16;

/// Bytes of one stored row: blocks of 32 values, the last one padded.
pub const fn row_bytes(head_dim: usize) -> usize {
    head_dim.div_ceil(BLOCK_VALUES) * BLOCK_BYTES
}

/// The live rows of one range of 128 absolute positions, in order of position.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    /// Rotated keys, `[row][row_bytes]`, 1 to 128 rows.
    pub k: &'a [u8],
    /// Values, as many rows.
    pub v: &'a [u8],
}

/// One decoding step: every query of a list attends to every row of the list.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Values per head, 1 to 256.
    pub head_dim: usize,
    /// Queries that share a list: the heads of one GQA group.
    pub n_query: usize,
    /// What multiplies q · k.
    pub scale: f32,
    /// Rotated queries, `[list][query][head_dim]`.
    pub q: &'a [f32],
    /// What each (sequence, KV head) holds: one or more pages in order of position.
    pub lists: &'a [Vec<Page<'a>>],
}

/// What the two launches get, in the kernel's own terms.
#[derive(Debug, PartialEq)]
pub struct Plan {
    /// `[list + 1]`: where each list's pages start.
    pub list_start: Vec<i32>,
    /// `[page]`: its list.
    pub page_list: Vec<i32>,
    /// `[page]`: its rows.
    pub page_rows: Vec<i32>,
    /// `[page]`: where its K starts in `bytes`.
    pub k_offset: Vec<u64>,
    /// `[page]`: where its V starts in `bytes`.
    pub v_offset: Vec<u64>,
    /// All pages, each at a multiple of 16 bytes and in whole granules.
    pub bytes: Vec<u8>,
    /// Blocks and threads per block of `attend_q8_0_pages`.
    pub pages_launch: (u32, u32),
    /// Blocks and threads per block of `attend_q8_0_merge`.
    pub merge_launch: (u32, u32),
}

impl Plan {
    /// Plans one step.
    ///
    /// # Errors
    /// [`CudaError::Input`] for shapes that the kernel's contract does not cover.
    pub fn new(batch: &Batch) -> Result<Self, CudaError> {
        check_heads(batch)?;
        let n_page: usize = batch.lists.iter().map(Vec::len).sum();
        let blocks = |n: usize| {
            let n = n
                .checked_mul(batch.n_query)
                .and_then(|n| i32::try_from(n).ok());
            n.map(i32::cast_unsigned).ok_or_else(|| {
                refuse(
                    "pages times queries",
                    format!("{n_page} × {}", batch.n_query),
                    "at most 2147483647 blocks",
                )
            })
        };
        let mut plan = Self {
            pages_launch: (blocks(n_page)?, PAGE_ROWS as u32),
            merge_launch: (blocks(batch.lists.len())?, batch.head_dim as u32),
            list_start: vec![0],
            page_list: Vec::with_capacity(n_page),
            page_rows: Vec::with_capacity(n_page),
            k_offset: Vec::with_capacity(n_page),
            v_offset: Vec::with_capacity(n_page),
            bytes: Vec::new(),
        };
        for (list, pages) in batch.lists.iter().enumerate() {
            if pages.is_empty() {
                return Err(refuse(
                    &format!("list {list}"),
                    "no pages".into(),
                    "one row or more",
                ));
            }
            for (page, rows) in pages.iter().enumerate() {
                let n_rows = check_page(rows, batch.head_dim).map_err(|(got, allowed)| {
                    refuse(&format!("list {list}, page {page}"), got, &allowed)
                })?;
                // Both casts hold: blocks() has shown that there are fewer pages, and so lists, than i32::MAX.
                plan.page_list.push(list as i32);
                plan.page_rows.push(n_rows as i32);
                plan.k_offset
                    .push(store(&mut plan.bytes, rows.k, batch.head_dim));
                plan.v_offset
                    .push(store(&mut plan.bytes, rows.v, batch.head_dim));
            }
            plan.list_start.push(plan.page_list.len() as i32);
        }
        Ok(plan)
    }
}

fn refuse(part: &str, got: String, allowed: &str) -> CudaError {
    CudaError::Input {
        place: format!("{}, {part}", SOURCE.name),
        got,
        allowed: allowed.to_owned(),
    }
}

fn check_heads(batch: &Batch) -> Result<(), CudaError> {
    if !(1..=MAX_HEAD_DIM).contains(&batch.head_dim) {
        return Err(refuse(
            "head_dim",
            batch.head_dim.to_string(),
            &format!("1 to {MAX_HEAD_DIM}"),
        ));
    }
    if batch.lists.is_empty() || batch.n_query == 0 {
        let got = format!(
            "{} lists, {} queries each",
            batch.lists.len(),
            batch.n_query
        );
        return Err(refuse("batch", got, "at least one of each"));
    }
    let expected = batch
        .lists
        .len()
        .checked_mul(batch.n_query)
        .and_then(|n| n.checked_mul(batch.head_dim));
    if expected != Some(batch.q.len()) {
        let allowed = format!(
            "{} lists × {} queries × {} values",
            batch.lists.len(),
            batch.n_query,
            batch.head_dim
        );
        return Err(refuse("q", format!("{} values", batch.q.len()), &allowed));
    }
    Ok(())
}

/// The page's rows, or what it is and what it should be.
fn check_page(page: &Page, head_dim: usize) -> Result<usize, (String, String)> {
    let row_bytes = row_bytes(head_dim);
    let n_rows = page.k.len() / row_bytes;
    if page.k.len() != page.v.len()
        || !page.k.len().is_multiple_of(row_bytes)
        || !(1..=PAGE_ROWS).contains(&n_rows)
    {
        let got = format!("{} bytes of K, {} of V", page.k.len(), page.v.len());
        return Err((
            got,
            format!("1 to {PAGE_ROWS} rows of {row_bytes} bytes, as many of K as of V"),
        ));
    }
    Ok(n_rows)
}

/// Appends a page in whole granules and says where it starts.
fn store(bytes: &mut Vec<u8>, page: &[u8], head_dim: usize) -> u64 {
    let start = bytes.len().next_multiple_of(PAGE_ALIGNMENT_BYTES);
    bytes.resize(start, 0);
    bytes.extend_from_slice(page);
    bytes.resize(
        start
            + page
                .len()
                .next_multiple_of(GRANULE_ROWS * row_bytes(head_dim)),
        0,
    );
    start as u64
}

/// The kernel, compiled and loaded for one GPU and one head_dim.
pub struct AttendQ8_0 {
    device: Device,
    head_dim: usize,
    pages: CudaFunction,
    merge: CudaFunction,
}

impl AttendQ8_0 {
    /// Compiles the kernel for this GPU, which takes some tenths of a second.
    ///
    /// # Errors
    /// [`CudaError::Input`] for a head_dim over 256, [`CudaError::NoCompiler`], [`CudaError::Compile`],
    /// [`CudaError::Driver`].
    pub fn load(device: &Device, head_dim: usize) -> Result<Self, CudaError> {
        if !(1..=MAX_HEAD_DIM).contains(&head_dim) {
            return Err(refuse(
                "head_dim",
                head_dim.to_string(),
                &format!("1 to {MAX_HEAD_DIM}"),
            ));
        }
        let module = device.load(&SOURCE, &[("HEAD_DIM", head_dim)])?;
        let function = |name: &str| {
            module
                .load_function(name)
                .map_err(during("finding a kernel in its module"))
        };
        Ok(Self {
            device: device.clone(),
            head_dim,
            pages: function("attend_q8_0_pages")?,
            merge: function("attend_q8_0_merge")?,
        })
    }

    /// Attends on the GPU, over pages that lie on the host: `[list][query][head_dim]`.
    ///
    /// # Errors
    /// [`CudaError::Input`] for shapes that [`Plan::new`] refuses or another head_dim than was loaded;
    /// [`CudaError::Driver`].
    pub fn run(&self, batch: &Batch) -> Result<Vec<f32>, CudaError> {
        if batch.head_dim != self.head_dim {
            return Err(refuse(
                "head_dim",
                batch.head_dim.to_string(),
                &format!("{}, as loaded", self.head_dim),
            ));
        }
        let plan = Plan::new(batch)?;
        self.launch(batch, &plan)
            .map_err(during("attending over q8_0 pages"))
    }

    fn launch(&self, batch: &Batch, plan: &Plan) -> Result<Vec<f32>, DriverError> {
        let stream = self.device.stream();
        let bytes = stream.clone_htod(&plan.bytes)?;
        let (base, _in_use) = bytes.device_ptr(stream);
        let addresses = |offsets: &[u64]| {
            stream.clone_htod(&offsets.iter().map(|at| base + at).collect::<Vec<u64>>())
        };
        let (k_pages, v_pages) = (addresses(&plan.k_offset)?, addresses(&plan.v_offset)?);
        let q = stream.clone_htod(batch.q)?;
        let page_rows = stream.clone_htod(&plan.page_rows)?;
        let page_list = stream.clone_htod(&plan.page_list)?;
        let list_start = stream.clone_htod(&plan.list_start)?;
        let n_part = plan.page_list.len() * batch.n_query;
        let mut part_m: CudaSlice<f32> = stream.alloc_zeros(n_part)?;
        let mut part_l: CudaSlice<f32> = stream.alloc_zeros(n_part)?;
        let mut part_acc: CudaSlice<f32> = stream.alloc_zeros(n_part * batch.head_dim)?;
        let mut out: CudaSlice<f32> = stream.alloc_zeros(batch.q.len())?;
        // The cast holds: the plan has counted at least n_query blocks in 31 bits.
        let n_query = batch.n_query as i32;

        let mut pages = stream.launch_builder(&self.pages);
        pages
            .arg(&q)
            .arg(&k_pages)
            .arg(&v_pages)
            .arg(&page_rows)
            .arg(&page_list)
            .arg(&n_query)
            .arg(&batch.scale);
        pages.arg(&mut part_m).arg(&mut part_l).arg(&mut part_acc);
        // SAFETY: the arguments are those of attend_q8_0_pages in type and order; the plan's tables point into `bytes` at
        // whole aligned pages, and the partials have one place per block.
        unsafe { pages.launch(config(plan.pages_launch)) }?;

        let mut merge = stream.launch_builder(&self.merge);
        merge
            .arg(&list_start)
            .arg(&n_query)
            .arg(&part_m)
            .arg(&part_l)
            .arg(&part_acc)
            .arg(&mut out);
        // SAFETY: the arguments are those of attend_q8_0_merge in type and order; list_start stays within the pages, and
        // `out` has head_dim places per block. The stream runs this after the partials are written.
        unsafe { merge.launch(config(plan.merge_launch)) }?;
        stream.clone_dtoh(&out)
    }
}

fn config((blocks, threads): (u32, u32)) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch<'a>(q: &'a [f32], lists: &'a [Vec<Page<'a>>]) -> Batch<'a> {
        Batch {
            head_dim: 80,
            n_query: 3,
            scale: 0.125,
            q,
            lists,
        }
    }

    #[test]
    fn a_plan_places_pages_in_aligned_granules() {
        let (full, short) = (vec![7u8; 128 * 102], vec![9u8; 17 * 102]);
        let page = |bytes| Page { k: bytes, v: bytes };
        let lists = [vec![page(&short)], vec![page(&full), page(&short)]];
        let q = vec![0.0; 2 * 3 * 80];
        let plan = Plan::new(&batch(&q, &lists)).unwrap();
        let (long_bytes, short_bytes) = (128 * 102, 32 * 102);
        assert_eq!(plan.list_start, [0, 1, 3]);
        assert_eq!(plan.page_list, [0, 1, 1]);
        assert_eq!(plan.page_rows, [17, 128, 17]);
        let pages = 2 * short_bytes;
        assert_eq!(plan.k_offset, [0, pages, pages + 2 * long_bytes]);
        assert_eq!(
            plan.v_offset,
            [
                short_bytes,
                pages + long_bytes,
                pages + 2 * long_bytes + short_bytes
            ]
        );
        assert_eq!(plan.bytes.len() as u64, 2 * pages + 2 * long_bytes);
        assert!(
            plan.k_offset
                .iter()
                .chain(&plan.v_offset)
                .all(|at| at.is_multiple_of(16))
        );
        assert_eq!(plan.bytes[..17 * 102], short);
        assert_eq!(plan.pages_launch, (3 * 3, 128));
        assert_eq!(plan.merge_launch, (2 * 3, 80));
    }

    #[test]
    fn what_the_contract_does_not_cover_is_refused() {
        let (rows, too_long) = (vec![0u8; 2 * 102], vec![0u8; 129 * 102]);
        let q = vec![0.0; 3 * 80];
        let good = [vec![Page { k: &rows, v: &rows }]];
        let refused = |batch: Batch| Plan::new(&batch).unwrap_err().to_string();
        assert_eq!(
            refused(Batch {
                head_dim: 257,
                ..batch(&q, &good)
            }),
            "attend_q8_0.cu, head_dim: got 257; allowed: 1 to 256"
        );
        assert_eq!(
            refused(batch(&q[1..], &good)),
            "attend_q8_0.cu, q: got 239 values; allowed: 1 lists × 3 queries × 80 values"
        );
        assert!(refused(batch(&[], &[])).contains("batch: got 0 lists, 3 queries each"));
        assert_eq!(
            refused(batch(&q, &[vec![]])),
            "attend_q8_0.cu, list 0: got no pages; allowed: one row or more"
        );
        for (k, v) in [
            (&rows[..], &rows[..102]),
            (&rows[..103], &rows[..103]),
            (&too_long, &too_long),
            (&[], &[]),
        ] {
            let message = refused(batch(&q, &[vec![good[0][0], Page { k, v }]]));
            assert!(
                message.contains("list 0, page 1: got ")
                    && message.ends_with("as many of K as of V"),
                "{message}"
            );
        }
    }
}
