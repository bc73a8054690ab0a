//! With the `cuda` feature: the launcher's plan through the host program, real compilation, and a real GPU if there is one.

use std::path::{Path, PathBuf};
use std::process::Command;

use kvlab::compute::cuda::attend_q8_0::{self, AttendQ8_0, Page, Plan};
use kvlab::compute::cuda::{CudaError, Device, KernelSource, compile_to_cubin};

use crate::batch::Batch;
use crate::host::Order;
use crate::{LISTS, attend, attend_program, bits};

fn lists(batch: &Batch) -> Vec<Vec<Page<'_>>> {
    (0..batch.k.len())
        .map(|list| batch.pages(list).map(|(k, v)| Page { k, v }).collect())
        .collect()
}

fn launch<'a>(batch: &'a Batch, lists: &'a [Vec<Page<'a>>]) -> attend_q8_0::Batch<'a> {
    attend_q8_0::Batch {
        head_dim: batch.head_dim,
        n_query: batch.n_query,
        scale: batch.scale,
        q: &batch.q,
        lists,
    }
}

fn planned_input(batch: &Batch) -> Vec<u8> {
    let plan = Plan::new(&launch(batch, &lists(batch))).unwrap();
    let ((pages, page_threads), (merges, merge_threads)) = (plan.pages_launch, plan.merge_launch);
    let counts = [
        plan.list_start.len() - 1,
        batch.n_query,
        plan.page_list.len(),
    ]
    .map(|n| n as u32);
    let mut input = Vec::new();
    for word in [
        Order::Forward as u32,
        pages,
        page_threads,
        merges,
        merge_threads,
    ]
    .iter()
    .chain(&counts)
    {
        input.extend(word.to_le_bytes());
    }
    input.extend(batch.scale.to_le_bytes());
    input.extend(
        [plan.list_start, plan.page_list, plan.page_rows]
            .concat()
            .iter()
            .flat_map(|x| x.to_le_bytes()),
    );
    input.extend(
        [plan.k_offset, plan.v_offset]
            .concat()
            .iter()
            .flat_map(|x| x.to_le_bytes()),
    );
    input.extend(batch.q.iter().flat_map(|x| x.to_le_bytes()));
    input.extend((plan.bytes.len() as u64).to_le_bytes());
    input.extend(plan.bytes);
    input
}

/// The launcher's tables, offsets and grids, carried out on the CPU, give what the test's own give.
#[test]
fn the_plan_carried_out_on_the_cpu() {
    for head_dim in [64, 80] {
        let Some(program) = attend_program(head_dim) else {
            return;
        };
        let batch = Batch::random(head_dim, 3, &LISTS);
        assert_eq!(
            bits(&program.attend(&planned_input(&batch))),
            bits(&attend(&program, &batch))
        );
    }
}

/// On a machine with a GPU: the kernel itself, within its contract's tolerance, and the same bits twice.
#[test]
fn on_a_gpu() {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(missing) => return eprintln!("SKIPPED: no kernel was run on a GPU: {missing}"),
    };
    for head_dim in [64, 80, 128, 256] {
        let kernel = match AttendQ8_0::load(&device, head_dim) {
            Err(missing @ CudaError::NoCompiler { .. }) => return eprintln!("SKIPPED: {missing}"),
            loaded => loaded.unwrap(),
        };
        for n_query in [1, 3, 4] {
            let batch = Batch::random(head_dim, n_query, &LISTS);
            let lists = lists(&batch);
            let out = kernel.run(&launch(&batch, &lists)).unwrap();
            let judged = batch.judge(&out);
            println!("{} {}: {judged:?}", device.name().unwrap(), device.arch());
            assert!(
                judged.worst <= 1.0,
                "head_dim {head_dim}, {n_query} queries: {judged:?}"
            );
            assert_eq!(
                bits(&out),
                bits(&kernel.run(&launch(&batch, &lists)).unwrap())
            );
        }
    }
}

/// NVRTC compiles every kernel for every architecture and head_dim. The loader looks for it by name, along a path that is
/// read when a process starts, so this starts [`compiling`] in a process of its own.
#[test]
fn compiles_to_cubins() {
    let Some(library) = find_nvrtc() else {
        return eprintln!(
            "SKIPPED: no kernel was compiled for a GPU: no NVRTC in the folder KVLAB_NVRTC or in python3's packages \
             (pip install nvidia-cuda-nvrtc-cu12)"
        );
    };
    // cudarc asks for names up to the CUDA version it was built for; a link makes a newer library answer to them.
    let links = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(&library, links.path().join("libnvrtc.so")).unwrap();
    let folders = [links.path(), library.parent().unwrap()];
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "device::compiling", "--ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", std::env::join_paths(folders).unwrap())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{}: {printed}", library.display());
    assert!(
        output.status.success(),
        "{printed}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(printed.matches(" bytes of cubin").count(), 12, "{printed}");
}

#[test]
#[ignore = "compiles_to_cubins runs this with NVRTC on its library path"]
fn compiling() {
    for arch in ["sm_80", "sm_90", "sm_100"] {
        for head_dim in [64, 80, 128, 256] {
            let cubin =
                compile_to_cubin(&attend_q8_0::SOURCE, arch, &[("HEAD_DIM", head_dim)]).unwrap();
            assert_eq!(cubin[..4], *b"\x7fELF");
            for kernel in ["attend_q8_0_pages", "attend_q8_0_merge"] {
                assert!(
                    cubin
                        .windows(kernel.len())
                        .any(|bytes| bytes == kernel.as_bytes()),
                    "{arch}: no {kernel}"
                );
            }
            println!(
                "{arch}, head_dim {head_dim}: {} bytes of cubin",
                cubin.len()
            );
        }
    }
    let refused = |source: &KernelSource, arch: &str| {
        compile_to_cubin(source, arch, &[]).unwrap_err().to_string()
    };
    let no_head_dim = refused(&attend_q8_0::SOURCE, "sm_90");
    assert!(
        no_head_dim.contains("attend_q8_0.cu(") && no_head_dim.contains("-DHEAD_DIM"),
        "{no_head_dim}"
    );
    let empty = KernelSource {
        name: "empty.cu",
        text: "",
    };
    let unknown = refused(&empty, "sm_1");
    assert!(
        unknown.starts_with("kernel empty.cu for sm_1: NVRTC answered"),
        "{unknown}"
    );
}

/// The library's file, in the folder that KVLAB_NVRTC names or among the packages of `python3`.
fn find_nvrtc() -> Option<PathBuf> {
    const FOLDERS: &str = "import nvidia, os
for root in nvidia.__path__:
    for folder, _, _ in sorted(os.walk(root)): print(folder)";
    let folders: Vec<PathBuf> = match std::env::var_os("KVLAB_NVRTC") {
        Some(folder) => vec![folder.into()],
        None => {
            let output = Command::new("python3")
                .args(["-c", FOLDERS])
                .output()
                .ok()?;
            String::from_utf8_lossy(&output.stdout)
                .lines()
                .map(PathBuf::from)
                .collect()
        }
    };
    folders.iter().find_map(|folder| nvrtc_in(folder))
}

fn nvrtc_in(folder: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(folder)
        .ok()?
        .flatten()
        .map(|entry| entry.path());
    files
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so"))
        })
        .min()?
        .canonicalize()
        .ok()
}
