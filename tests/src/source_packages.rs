//! Source packages of Debian that tests compile. `cargo xtask test` fetches them once, below the
//! target folder; tests do not use the network.

use crate::machine::build_folder;
use crate::run::run_successfully;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Time limit for the download of lists and of a package over a slow line.
const FETCH_TIMEOUT: Duration = Duration::from_secs(300);
/// Name of the folder below the target folder.
const FOLDER: &str = "source-packages";
/// Folder with the lists and the cache of apt, next to the packages.
const APT_FOLDER: &str = "apt";
/// Fields of a source of packages in the output of `apt-get indextargets`, separated by tabs.
const SOURCE_FIELDS: &str = "$(LABEL)\t$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)";

/// A source package of Debian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourcePackage {
    pub name: &'static str,
    /// Start of the name of the original archive, with the version of the sources.
    archive: &'static str,
}

/// fastDNAml 1.2.2, a program with a master and slaves over p4.
pub const FASTDNAML: SourcePackage = SourcePackage {
    name: "fastdnaml",
    archive: "fastdnaml_1.2.2.orig.tar.gz",
};

impl SourcePackage {
    /// Returns the reason why the package is not on this machine; `None` if the set-up has fetched
    /// it.
    pub fn unmet_requirement(&self) -> Option<String> {
        let archive = folder().map(|folder| folder.join(self.archive));
        match archive {
            Ok(archive) if archive.exists() => None,
            _ => Some(format!(
                "the Debian source package {} is not available: cargo xtask test fetches it",
                self.name
            )),
        }
    }

    /// Unpacks the original archive into a folder.
    ///
    /// # Errors
    /// The package was not fetched, or the archive is damaged.
    pub fn unpack(&self, target: &Path) -> Result<()> {
        let mut unpack = Command::new("tar");
        unpack
            .args(["--extract", "--gzip", "--file"])
            .arg(folder()?.join(self.archive))
            .arg("--directory")
            .arg(target);
        run_successfully(unpack, FETCH_TIMEOUT).map(drop)
    }

    /// Fetches the package with apt from the mirror of this machine, unless an earlier call has
    /// done so. The lists and settings of the machine's apt are not changed.
    ///
    /// # Errors
    /// apt knows no source of Debian, or cannot fetch the package.
    pub fn ensure_fetched(&self) -> Result<()> {
        if self.unmet_requirement().is_none() {
            return Ok(());
        }
        let folder = folder()?;
        let apt_folder = folder.join(APT_FOLDER);
        for name in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(apt_folder.join(name))
                .with_context(|| apt_folder.display().to_string())?;
        }
        fs::write(apt_folder.join("sources.list"), source_entries()?)?;
        println!("setup: fetching the source package {}", self.name);
        for arguments in [
            &["update"][..],
            &["source", "--download-only", "--only-source", self.name],
        ] {
            let mut apt = apt_command(&apt_folder);
            apt.current_dir(&folder).args(arguments);
            run_successfully(apt, FETCH_TIMEOUT)
                .with_context(|| format!("apt cannot fetch the source package {}", self.name))?;
        }
        // The lists take 20 MiB.
        let _ = fs::remove_dir_all(&apt_folder);
        match self.unmet_requirement() {
            None => Ok(()),
            Some(_) => bail!("Debian's {} has no {}", self.name, self.archive),
        }
    }
}

/// Returns the folder of fetched packages.
fn folder() -> Result<PathBuf> {
    let build_folder = build_folder()?;
    let target_folder = build_folder.parent().unwrap_or(&build_folder);
    Ok(target_folder.join(FOLDER))
}

/// Returns a command of apt with lists and a cache of its own.
fn apt_command(apt_folder: &Path) -> Command {
    let mut apt = Command::new("apt-get");
    apt.args(["-qq", "-o", "Acquire::Retries=3"]);
    for (option, path) in [
        ("Dir::Etc::SourceList", "sources.list"),
        ("Dir::State::Lists", "lists"),
        ("Dir::Cache", "cache"),
    ] {
        let value = apt_folder.join(path);
        apt.arg("-o").arg(format!("{option}={}", value.display()));
    }
    // The sources of the machine are left out.
    apt.args(["-o", "Dir::Etc::SourceParts=/dev/null"]);
    apt
}

/// Returns entries for the sources of the packages that this machine installs from Debian.
fn source_entries() -> Result<String> {
    let mut list = Command::new("apt-get");
    list.args(["indextargets", "--format", SOURCE_FIELDS]);
    list.arg("Created-By: Packages");
    let targets = run_successfully(list, FETCH_TIMEOUT)?.stdout;
    let entry = |line: &str| {
        let fields: Vec<&str> = line.split('\t').collect();
        match fields[..] {
            ["Debian", uri, release, component] => {
                Some(format!("deb-src {uri} {release} {component}\n"))
            }
            _ => None,
        }
    };
    // A release with several architectures is in the list several times.
    let entries: BTreeSet<String> = targets.lines().filter_map(entry).collect();
    if entries.is_empty() {
        bail!("apt's configuration names no mirror of Debian");
    }
    Ok(entries.into_iter().collect())
}
