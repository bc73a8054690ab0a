//! Texts from the Hugging Face hub.

use std::io::Read;

use hf_hub::HFClientSync;

use super::manifest::HubFile;

/// The bytes of a file of a dataset repository, or of a member of it when it is a zip archive. The file is kept in the
/// hub client's own cache. Errors are the reason in words.
pub fn fetch(file: &HubFile) -> Result<Vec<u8>, String> {
    let (owner, name) = file
        .repo
        .split_once('/')
        .ok_or("the repository is not owner/name")?;
    let client = HFClientSync::new().map_err(|e| e.to_string())?;
    let path = client
        .dataset(owner, name)
        .download_file()
        .filename(file.file.clone())
        .send()
        .map_err(|e| e.to_string())?;
    let bytes = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    match &file.member {
        None => Ok(bytes),
        Some(member) => zip_member(&bytes, member),
    }
}

/// A member of a zip archive, stored or deflated. Its content is checked by the caller's sha256, not by the archive's CRC.
fn zip_member(zip: &[u8], member: &str) -> Result<Vec<u8>, String> {
    let damaged = || "the archive is damaged".to_owned();
    let u16_at = |at: usize| -> Option<usize> {
        let b = zip.get(at..at.checked_add(2)?)?;
        Some(usize::from(b[0]) | usize::from(b[1]) << 8)
    };
    let u32_at = |at: usize| Some(u16_at(at)? | u16_at(at.checked_add(2)?)? << 16);
    // The end record: signature, then at +10 the number of entries and at +16 the central directory's offset.
    let end = zip
        .windows(4)
        .rposition(|w| w == b"PK\x05\x06")
        .filter(|end| zip.len() >= end + 22)
        .ok_or_else(damaged)?;
    let n = u16_at(end + 10).ok_or_else(damaged)?;
    let mut at = u32_at(end + 16).ok_or_else(damaged)?;
    for _ in 0..n {
        // A central entry: method +10, sizes +20 and +24, name length +28, extra +30, comment +32, local offset +42.
        let field = |offset: usize| u16_at(at + offset).ok_or_else(damaged);
        let (method, name_len) = (field(10)?, field(28)?);
        let (extra, comment) = (field(30)?, field(32)?);
        let name = zip.get(at + 46..at + 46 + name_len).ok_or_else(damaged)?;
        if name == member.as_bytes() {
            let packed_len = u32_at(at + 20).ok_or_else(damaged)?;
            let len = u32_at(at + 24).ok_or_else(damaged)?;
            let local = u32_at(at + 42).ok_or_else(damaged)?;
            let skip = |offset: usize| u16_at(local + offset).ok_or_else(damaged);
            let start = local + 30 + skip(26)? + skip(28)?;
            let packed = zip.get(start..start + packed_len).ok_or_else(damaged)?;
            return unpack(packed, method, len);
        }
        at += 46 + name_len + extra + comment;
    }
    Err(format!("the archive has no member `{member}`"))
}

fn unpack(packed: &[u8], method: usize, len: usize) -> Result<Vec<u8>, String> {
    match method {
        0 => Ok(packed.to_vec()),
        8 => {
            let mut out = Vec::new();
            // One byte more than promised is enough to see that the archive lies.
            let mut reader = flate2::read::DeflateDecoder::new(packed).take(len as u64 + 1);
            reader
                .read_to_end(&mut out)
                .map_err(|e| format!("the archive is damaged: {e}"))?;
            Ok(out)
        }
        other => Err(format!(
            "the archive uses compression method {other}; supported are 0 and 8"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A zip of one member, written by hand.
    fn zip(name: &str, content: &[u8], method: u16) -> Vec<u8> {
        let packed = if method == 8 {
            let mut e = flate2::write::DeflateEncoder::new(Vec::new(), Default::default());
            e.write_all(content).unwrap();
            e.finish().unwrap()
        } else {
            content.to_vec()
        };
        let sizes = [packed.len() as u32, content.len() as u32]
            .map(u32::to_le_bytes)
            .concat();
        let name_len = (name.len() as u16).to_le_bytes();
        let mut out = b"PK\x03\x04\x14\0\0\0".to_vec();
        out.extend(method.to_le_bytes());
        out.extend([0; 8]);
        out.extend(&sizes);
        out.extend(name_len);
        out.extend([0; 2]);
        out.extend(name.as_bytes());
        out.extend(&packed);
        let directory = out.len() as u32;
        out.extend(b"PK\x01\x02\x14\0\x14\0\0\0");
        out.extend(method.to_le_bytes());
        out.extend([0; 8]);
        out.extend(&sizes);
        out.extend(name_len);
        out.extend([0; 16]);
        out.extend(name.as_bytes());
        let size = out.len() as u32 - directory;
        out.extend(b"PK\x05\x06\0\0\0\0\x01\0\x01\0");
        out.extend(size.to_le_bytes());
        out.extend(directory.to_le_bytes());
        out.extend([0; 2]);
        out
    }

    #[test]
    fn members_come_out_and_damage_is_told() {
        let content = b"= Robert =\n".repeat(40);
        for method in [0, 8] {
            let archive = zip("dir/wiki.test.raw", &content, method);
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
        assert!(
            zip_member(&zip("a", b"x", 9), "a")
                .unwrap_err()
                .contains("method 9")
        );
    }
}
