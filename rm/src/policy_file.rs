//! The policy file on disk: read at the start and watched for changes. New content is sent to the
//! service as a message, because the service waits for messages only.

use crate::api::{RealVm, VmApi};
use crate::policy::POLICY_BYTES_MAX;
use crate::service::TAG_POLICY;
use bytes::Bytes;
use libpvm::Vm;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use sempa_proto::Message;
use sempa_proto::event::EventKind;
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::rm::CTX_RM;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Returns the content of the file. Of a file that is too long, just enough to detect that.
fn content(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?
        .take(POLICY_BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the content of the file at the start.
///
/// # Errors
/// Why the file cannot be read.
pub fn read(path: &Path) -> Result<Vec<u8>, String> {
    content(path).map_err(|error| error.to_string())
}

/// Sends the content to the own task whenever the file is written or replaced. `known`: the content
/// read at the start.
///
/// # Errors
/// The file's directory cannot be watched.
pub fn follow(path: &Path, known: Result<Vec<u8>, String>, vm: &Vm) -> std::io::Result<()> {
    let (vm, path) = (vm.clone(), std::path::absolute(path)?);
    let folder = path
        .parent()
        .map_or_else(|| PathBuf::from("/"), Path::to_path_buf);
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC)?;
    // Watches the directory instead of the file, because editors replace the file.
    inotify.add_watch(
        &folder,
        AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO,
    )?;
    std::thread::spawn(move || {
        // The file may have changed since it was first read. Unchanged content is not sent again.
        if read(&path) != known {
            tell(&path, &vm);
        }
        drop(known);
        while let Ok(events) = inotify.read_events() {
            if events
                .iter()
                .any(|event| event.name.as_deref() == path.file_name())
            {
                tell(&path, &vm);
            }
        }
    });
    Ok(())
}

/// Sends the content to the own task. A missing file changes nothing. A file that cannot be read
/// changes nothing either, and is noted in the event log.
fn tell(path: &Path, vm: &Vm) {
    let body = match content(path) {
        Ok(bytes) => Bytes::from(bytes),
        Err(error) if error.kind() == ErrorKind::NotFound => return,
        Err(error) => {
            let text = format!(
                "{} cannot be read: {error}; the policy is unchanged",
                path.display()
            );
            let vm = RealVm::new(vm.clone());
            drop(vm.record(vm.wall(), EventKind::Note { text }));
            return;
        }
    };
    let src = vm.tid();
    let message = Message {
        src,
        dst: src,
        ctx: CTX_RM,
        tag: TAG_POLICY,
        wid: 0,
        enc: DSIG_X86_64,
        body,
    };
    // Without a daemon the service ends, and this thread with it.
    drop(vm.send_message(message));
}
