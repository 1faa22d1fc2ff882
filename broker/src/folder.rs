//! The folder of a session: journal, key and certificate. Only the user may enter it.

use anyhow::{Context, Result};
use libpvm::Vm;
use libpvm::runtime::runtime_paths;
use ring::rand::{SecureRandom, SystemRandom};
use sempa_broker_client::session_file::write_private;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const IDENTITY_FILE: &str = "identity";
/// Prefix of the link in the runtime directory, which the daemon knows, too.
const LINK_PREFIX: &str = "broker-";
/// Length of the session's key in bytes.
const KEY_BYTES: usize = 32;

/// What identifies a session's broker to members outside; it survives a restart of the broker.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// Key from which the secrets of the roles are derived.
    pub(crate) session_key: Vec<u8>,
    /// The broker's certificate (DER).
    pub(crate) certificate: Vec<u8>,
    /// The private key of the certificate (PKCS #8).
    pub(crate) private_key: Vec<u8>,
    /// The TCP port; 0 before the broker has listened for the first time.
    pub(crate) port: u16,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity(port {})", self.port)
    }
}

impl Identity {
    fn generate(port: u16) -> Result<Self> {
        let mut session_key = vec![0; KEY_BYTES];
        SystemRandom::new()
            .fill(&mut session_key)
            .map_err(|_| anyhow::anyhow!("the system gives no random bytes for a secret"))?;
        let name = sempa_broker_client::tls::SERVER_NAME.to_string();
        let made = rcgen::generate_simple_self_signed(vec![name])
            .context("the broker's certificate cannot be made")?;
        Ok(Self {
            session_key,
            certificate: made.cert.der().to_vec(),
            private_key: made.signing_key.serialize_der(),
            port,
        })
    }

    /// Reads the identity in a folder; generates one if there is none.
    pub(crate) fn read_or_generate(folder: &Path, port: u16) -> Result<Self> {
        match fs::read(folder.join(IDENTITY_FILE)) {
            Ok(bytes) => postcard::from_bytes(&bytes)
                .with_context(|| format!("{} has no identity of this version", folder.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Self::generate(port),
            Err(error) => Err(error).context(format!("{} cannot be read", folder.display())),
        }
    }

    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let bytes = postcard::to_stdvec(self)?;
        write_private(&folder.join(IDENTITY_FILE), &bytes)
            .with_context(|| format!("{} cannot be written", folder.display()))
    }
}

/// Returns the folder for the journals of this virtual machine's brokers, in the user's state
/// directory.
///
/// # Errors
/// The environment names no home directory.
pub(crate) fn sessions_folder(vm: &Vm) -> Result<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).filter(|v| Path::new(v).is_absolute());
    let state_dir = absolute("XDG_STATE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(Path::new(&absolute("HOME")?).join(".local/state")))
        .context("neither XDG_STATE_HOME nor HOME is an absolute path: set HOME")?;
    let vm_name = std::env::var("PVM_VMID").unwrap_or_default();
    let vm_name = if vm_name.is_empty() { "pvm" } else { &vm_name };
    // Virtual machines with different masters may share a home directory.
    let hosts = vm.config()?.hosts;
    let master = hosts.first().map_or("", |host| host.name.as_str());
    let folder_name = format!("{vm_name}@{}", master.replace('/', "_"));
    Ok(state_dir.join("sempa/broker").join(folder_name))
}

/// Makes the folder of a session.
///
/// # Errors
/// The folder cannot be made.
pub(crate) fn make(path: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("the session's folder {} cannot be made", path.display()))
}

/// Registers the folder of a session in the runtime directory of the virtual machine. If this
/// broker is killed, the daemon of this host removes the folder when the daemon ends.
///
/// # Errors
/// The runtime directory cannot be written.
pub(crate) fn register(path: &Path, session: &str) -> Result<()> {
    let link = link_path(session)?;
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(path, &link)
        .with_context(|| format!("the link {} cannot be made", link.display()))
}

fn link_path(session: &str) -> Result<PathBuf> {
    let variable = |name: &str| std::env::var(name).ok();
    let paths = runtime_paths(nix::unistd::getuid().as_raw(), variable)?;
    Ok(paths.dir().join(format!("{LINK_PREFIX}{session}")))
}

/// Removes the folder of a session, its parents that are empty then, and its link in the runtime
/// directory.
pub(crate) fn remove(path: &Path) {
    let session = path.file_name().unwrap_or_default().to_string_lossy();
    if let Ok(link) = link_path(&session) {
        // The daemon may have removed the link, or there was none.
        let _ = fs::remove_file(link);
    }
    if let Err(error) = fs::remove_dir_all(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        eprintln!("pvm-broker: {} was not removed: {error}", path.display());
    }
    // The parents belong to other sessions and programs, too.
    for parent in path.ancestors().skip(1).take(3) {
        if fs::remove_dir(parent).is_err() {
            break;
        }
    }
}
