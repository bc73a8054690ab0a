//! Texts from the Hugging Face hub.

use std::io::{Cursor, Read};

use hf_hub::api::sync::ApiBuilder;
use zip::result::ZipError;

use super::manifest::HubFile;

/// Longer than any text that is listed; keeps a lying archive from filling memory.
const MAX_MEMBER_BYTES: u64 = 1 << 30;

/// The bytes of a file of a dataset repository, or of a member of it when it is a zip archive. The file is kept in the
/// hub client's own cache. Errors are the reason in words.
pub fn fetch(file: &HubFile) -> Result<Vec<u8>, String> {
    let api = ApiBuilder::from_env().with_progress(false).build();
    let repository = api.map_err(|e| e.to_string())?.dataset(file.repo.clone());
    let path = repository.get(&file.file).map_err(|e| e.to_string())?;
    let bytes = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    match &file.member {
        None => Ok(bytes),
        Some(member) => zip_member(&bytes, member),
    }
}

/// A member of a zip archive.
fn zip_member(zip: &[u8], member: &str) -> Result<Vec<u8>, String> {
    let mut archive = zip::ZipArchive::new(Cursor::new(zip))
        .map_err(|e| format!("the archive is damaged: {e}"))?;
    let file = archive.by_name(member).map_err(|e| match e {
        ZipError::FileNotFound => format!("the archive has no member `{member}`"),
        e => format!("the archive is damaged: {e}"),
    })?;
    let mut file = file.take(MAX_MEMBER_BYTES);
    let mut out = Vec::new();
    file.read_to_end(&mut out)
        .map_err(|e| format!("the archive is damaged: {e}"))?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn members_come_out_and_damage_is_told() {
        let content = b"= Robert =\n".repeat(40);
        for method in [
            zip::CompressionMethod::Stored,
            zip::CompressionMethod::Deflated,
        ] {
            let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
            let options = zip::write::SimpleFileOptions::default().compression_method(method);
            writer.start_file("dir/wiki.test.raw", options).unwrap();
            writer.write_all(&content).unwrap();
            let archive = writer.finish().unwrap().into_inner();
            assert_eq!(zip_member(&archive, "dir/wiki.test.raw").unwrap(), content);
            assert!(
                zip_member(&archive, "other")
                    .unwrap_err()
                    .contains("no member")
            );
            for cut in 0..archive.len() {
                assert!(
                    zip_member(&archive[..cut], "dir/wiki.test.raw").is_err(),
                    "{cut}"
                );
            }
        }
    }
}
