//! Makes the Debian packages with debhelper's programs.
//!
//! debhelper knows what each release of Debian expects of maintainer scripts, shared libraries and
//! units, and makes the same package of the same files. Its sequencer `dh` is not used, because
//! cargo builds the programs and [`crate::contents`] distributes them.

use crate::contents::{
    EXTRA_FILES, FILES_OF_PROGRAMS, LINKS, UNITS_OF_PROGRAMS, destination_of, is_left_out,
    library_links,
};
use crate::process::{capture, run};
use crate::python::{Installer, PYTHON_PACKAGE, PythonModule};
use crate::{Compression, Inputs, TRIPLET, remove_folder};
use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask_install::{DebianPackage, INSTALLED_PACKAGES, PROGRAMS, project_folder};

/// Version of PVM whose interface the packages provide.
const PVM_VERSION: &str = "3.4.6";
/// Where Debian's Python finds the modules of packages.
const DIST_PACKAGES: &str = "usr/lib/python3/dist-packages";
/// Where the package sempa-criu has its files.
const CRIU_FOLDER: &str = "usr/lib/sempa/criu";
/// Maintainer of the packages, unless `DEBFULLNAME` and `DEBEMAIL` are set.
const DEFAULT_MAINTAINER: (&str, &str) = ("Sempa packagers", "packagers@sempa.example.org");

/// A release of the packages.
pub(crate) struct Release {
    /// Number after the hyphen of the version.
    revision: u32,
    /// Unix time in seconds of all files in the packages.
    pub(crate) epoch: u64,
}

impl Release {
    /// Returns the release of these sources. Its time is `SOURCE_DATE_EPOCH`, or the time of the
    /// last commit.
    ///
    /// # Errors
    /// Neither is known.
    pub(crate) fn new(revision: u32) -> Result<Self> {
        let epoch_text = match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(text) => text,
            Err(_) => capture(
                Command::new("git")
                    .args(["log", "-1", "--format=%ct"])
                    .current_dir(project_folder()),
            )
            .context("set SOURCE_DATE_EPOCH: the time of the last commit is not known")?,
        };
        let epoch = epoch_text
            .trim()
            .parse()
            .with_context(|| format!("SOURCE_DATE_EPOCH is not a number: {epoch_text}"))?;
        Ok(Self { revision, epoch })
    }

    /// Version of the sources.
    pub(crate) fn source_version(&self) -> &'static str {
        env!("CARGO_PKG_VERSION")
    }

    /// Version of the packages.
    pub(crate) fn version(&self) -> String {
        format!("{}-{}", self.source_version(), self.revision)
    }
}

/// A release that is being packaged, and the folders of its files.
struct Packaging<'a> {
    release: &'a Release,
    /// Installation with the files of the packages.
    prefix: &'a Path,
    python: &'a PythonModule,
    /// Folder with the folder `debian`, in which debhelper's programs work.
    folder: PathBuf,
    /// The packages to make, without those that lack a program.
    packages: Vec<DebianPackage>,
    /// Version of CRIU; `None` without a package of it.
    criu_version: Option<String>,
}

/// Makes all packages in the folder `out` and returns their paths. Without a CRIU there is no
/// package sempa-criu.
///
/// # Errors
/// A program is missing, or debhelper refuses something.
pub(crate) fn make_packages(
    release: &Release,
    inputs: &Inputs<'_>,
    compression: Compression,
    out: &Path,
) -> Result<Vec<PathBuf>> {
    let criu = inputs.criu;
    let folder = inputs.work_folder.join("deb");
    remove_folder(&folder)?;
    let criu_version = criu_version(&criu.join("sbin/criu"));
    if criu_version.is_none() {
        println!(
            "package: sempa-criu is not made, because there is no CRIU in {}: run cargo xtask criu",
            criu.display()
        );
    }
    let packages = DebianPackage::ALL
        .into_iter()
        .filter(|package| *package != DebianPackage::Criu || criu_version.is_some())
        .collect();
    let packaging = Packaging {
        release,
        prefix: inputs.prefix,
        python: inputs.python,
        folder,
        packages,
        criu_version,
    };
    packaging.write_definitions(criu)?;
    packaging.distribute_files()?;
    if packaging.criu_version.is_some() {
        packaging.copy_criu(criu)?;
    }
    packaging.run_debhelper(compression, out)?;
    let mut made: Vec<PathBuf> = fs::read_dir(out)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "deb"))
        .collect();
    made.sort();
    if made.len() != packaging.packages.len() {
        bail!("debhelper made other packages than expected: {made:?}");
    }
    Ok(made)
}

/// Returns the version that a CRIU prints, or `None` if it cannot be executed.
fn criu_version(program: &Path) -> Option<String> {
    let text = capture(Command::new(program).arg("--version")).ok()?;
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("Version:"))?;
    Some(version.trim().to_string())
}

impl Packaging<'_> {
    /// Returns the folder that becomes the root of a package.
    fn root_of(&self, package: DebianPackage) -> PathBuf {
        self.folder.join("debian").join(package.name())
    }

    fn has_program(&self, name: &str) -> bool {
        ["bin", "sbin"]
            .iter()
            .any(|folder| self.prefix.join(folder).join(name).exists())
    }

    /// Returns the package of a program; `None` if the program was not built.
    fn package_of_program(&self, name: &str) -> Option<DebianPackage> {
        PROGRAMS
            .iter()
            .find(|program| program.name == name && self.has_program(name))
            .map(|program| program.package)
    }

    /// Writes the folder `debian`: the files of `packaging/debian`, and the changelog.
    fn write_definitions(&self, criu: &Path) -> Result<()> {
        let target = self.folder.join("debian");
        fs::create_dir_all(&target)?;
        let source = project_folder().join("packaging/debian");
        for entry in fs::read_dir(&source).with_context(|| source.display().to_string())? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default();
            let text = fs::read_to_string(&path)?;
            let is_for_made_package = |package: &DebianPackage| {
                name.to_string_lossy()
                    .starts_with(&format!("{}.", package.name()))
            };
            let text = match name.to_str() {
                Some("control") => self.control(&text),
                Some("copyright") => self.copyright(&text, criu)?,
                _ if self.packages.iter().any(is_for_made_package) => text,
                _ => continue,
            };
            fs::write(target.join(name), text)?;
        }
        let date = capture(Command::new("date").args([
            "--utc",
            "--rfc-email",
            "--date",
            &format!("@{}", self.release.epoch),
        ]))?;
        let changelog = format!(
            "sempa ({}) unstable; urgency=medium\n\n  * Version {}; /usr/share/doc/sempa/changelog.gz \
             describes the changes.\n\n -- {}  {}\n",
            self.release.version(),
            self.release.source_version(),
            maintainer(),
            date.trim()
        );
        fs::write(target.join("changelog"), changelog)?;
        Ok(())
    }

    fn control(&self, template: &str) -> String {
        let node_text = if self.has_program("pvm-taskerd") {
            ", and the service\n pvm-taskerd, which migrates, limits and checkpoints the tasks of all users."
        } else {
            "."
        };
        let text = template
            .replace("@MAINTAINER@", &maintainer())
            .replace("@NODE@", node_text);
        let is_made = |stanza: &&str| {
            let name = stanza
                .lines()
                .find_map(|line| line.strip_prefix("Package: "));
            name.is_none_or(|name| self.packages.iter().any(|package| package.name() == name))
        };
        let stanzas: Vec<&str> = text.split("\n\n").filter(is_made).collect();
        stanzas.join("\n\n")
    }

    fn copyright(&self, template: &str, criu: &Path) -> Result<String> {
        let license = fs::read_to_string(project_folder().join("LICENSE-MIT"))?;
        let mut tree = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        tree.args(["tree", "--locked", "--offline", "--prefix", "none"])
            .args(["--edges", "normal", "--format", "{p}: {l}"])
            .args(INSTALLED_PACKAGES.iter().flat_map(|name| ["-p", name]))
            .args(["-p", PYTHON_PACKAGE])
            .current_dir(project_folder());
        let mut crates: Vec<String> = capture(&mut tree)?
            .lines()
            .filter(|line| !line.contains('(') && !line.is_empty())
            .map(|line| format!(" {line}"))
            .collect();
        crates.sort();
        crates.dedup();
        let criu_files = match &self.criu_version {
            None => String::new(),
            Some(version) => {
                let origin = fs::read_to_string(criu.join("share/criu/ORIGIN")).unwrap_or_default();
                format!(
                    "Files: {CRIU_FOLDER}/*\nCopyright: The authors of CRIU and of the libraries\nLicense: GPL-2\n \
                     CRIU is licensed under the GNU General Public License, version 2: see\n \
                     /usr/share/common-licenses/GPL-2. The libraries in its folder are unchanged\n libraries of \
                     Debian, under the licenses of their packages there.\nComment:\n CRIU {version}, {}\n",
                    origin.trim().replace('\n', ", ")
                )
            }
        };
        Ok(template
            .replace("@CRIU_FILES@\n", &(criu_files + "\n"))
            .replace("@MIT@", &indented(&license))
            .replace("@CRATES@", &crates.join("\n")))
    }

    /// Copies every file of the installation to the root of its package, and makes the links.
    fn distribute_files(&self) -> Result<()> {
        let version = self.release.source_version();
        for path in files_below(self.prefix, Path::new(""))? {
            let source_path = self.prefix.join(&path);
            if source_path.is_symlink() || is_left_out(&path) {
                continue;
            }
            let Some(destination) = destination_of(&path, version) else {
                bail!(
                    "no package has {}: name it in xtask/package/src/contents.rs",
                    path.display()
                );
            };
            let target_path = self.root_of(destination.package).join(&destination.path);
            copy(&source_path, &target_path)?;
            if path.starts_with("lib/pkgconfig") {
                set_package_config_prefix(&target_path)?;
            }
        }
        for program in PROGRAMS {
            if !self.has_program(program.name) {
                bail!("{} was not built", program.name);
            }
        }
        for (package, path, target) in LINKS {
            link(target, &self.root_of(package).join(path))?;
        }
        for (package, path, target) in library_links(version) {
            link(&target, &self.root_of(package).join(path))?;
        }
        let python_root = self.root_of(DebianPackage::Python);
        self.python
            .write_tree(&python_root.join(DIST_PACKAGES), Installer::Debian)?;
        for (source, package, path) in EXTRA_FILES {
            copy(
                &project_folder().join(source),
                &self.root_of(package).join(path),
            )?;
        }
        for (program, source, path) in FILES_OF_PROGRAMS {
            if let Some(package) = self.package_of_program(program) {
                copy(
                    &project_folder().join(source),
                    &self.root_of(package).join(path),
                )?;
            }
        }
        for (program, source) in UNITS_OF_PROGRAMS {
            if let Some(package) = self.package_of_program(program) {
                let unit = Path::new(source).file_name().unwrap_or_default();
                let name = format!("{}.{}", package.name(), unit.to_string_lossy());
                copy(
                    &project_folder().join(source),
                    &self.folder.join("debian").join(name),
                )?;
            }
        }
        // Packages of PVM programs, such as Debian's tablix2, have their files here.
        let programs_of_all = self
            .root_of(DebianPackage::Programs)
            .join("usr/lib/pvm3/bin/LINUX64");
        fs::create_dir_all(programs_of_all)?;
        Ok(())
    }

    /// Copies CRIU and makes it use the libraries at the new place.
    fn copy_criu(&self, criu: &Path) -> Result<()> {
        let target = self.root_of(DebianPackage::Criu).join(CRIU_FOLDER);
        let Some(parent) = target.parent() else {
            bail!("{} has no parent", target.display());
        };
        fs::create_dir_all(parent)?;
        run(Command::new("cp").arg("-a").arg(criu).arg(&target))?;
        remove_folder(&target.join("share"))?;
        let old_prefix = std::path::absolute(criu)?;
        let relocated = |text: &str| {
            let old = old_prefix.to_string_lossy().into_owned();
            text.trim().replace(&old, &format!("/{CRIU_FOLDER}"))
        };
        for path in files_below(&target, Path::new(""))? {
            let file = target.join(&path);
            if file.is_symlink() {
                continue;
            }
            let query = |option: &str| capture(Command::new("patchelf").arg(option).arg(&file));
            // Files that are no programs or libraries have neither.
            let run_path = query("--print-rpath").unwrap_or_default();
            if !run_path.trim().is_empty() {
                run(Command::new("patchelf")
                    .args(["--force-rpath", "--set-rpath", &relocated(&run_path)])
                    .arg(&file))?;
            }
            let loader = if path.starts_with("sbin") {
                query("--print-interpreter").unwrap_or_default()
            } else {
                String::new()
            };
            if !loader.trim().is_empty() {
                run(Command::new("patchelf")
                    .args(["--set-interpreter", &relocated(&loader)])
                    .arg(&file))?;
            }
        }
        Ok(())
    }

    fn run_debhelper(&self, compression: Compression, out: &Path) -> Result<()> {
        let only_library = format!("-p{}", DebianPackage::Library.name());
        let only_new_libraries = [DebianPackage::WorkLibrary, DebianPackage::BrokerLibrary]
            .map(|package| format!("-p{}", package.name()));
        let only_node = format!("-p{}", DebianPackage::Node.name());
        let only_python = format!("-p{}", DebianPackage::Python.name());
        let changelog = project_folder().join("CHANGELOG.md").display().to_string();
        let library_dependency = format!("libpvm3 (>= {PVM_VERSION})");
        let pvm = format!(
            "-Vsempa:Pvm={PVM_VERSION}+sempa{}",
            self.release.source_version()
        );
        let criu = format!(
            "-Vsempa:Criu={}",
            self.criu_version.as_deref().unwrap_or_default()
        );
        let level = match compression {
            Compression::Strong => "-z6",
            Compression::Little => "-z0",
        };
        let destination = format!("--destdir={}", out.display());
        let without_criu = format!("-X{CRIU_FOLDER}");
        let mut steps: Vec<(&str, Vec<&str>)> = vec![
            ("dh_installdocs", vec![]),
            ("dh_installchangelogs", vec![&changelog]),
            ("dh_lintian", vec![]),
            ("dh_python3", vec![&only_python]),
        ];
        if self.has_program("pvm-taskerd") {
            // The socket starts the service. Tasks are children of the service, so an upgrade stops
            // neither.
            steps.push((
                "dh_installsystemd",
                vec![
                    &only_node,
                    "--name=sempa-taskerd",
                    "--no-enable",
                    "--no-start",
                    "--no-stop-on-upgrade",
                ],
            ));
            steps.push((
                "dh_installsystemd",
                vec![&only_node, "--no-stop-on-upgrade", "sempa-taskerd.socket"],
            ));
        }
        steps.extend([
            ("dh_strip", vec!["--no-automatic-dbgsym", &without_criu]),
            ("dh_compress", vec![]),
            // The loader of the packaged CRIU is executed, unlike other libraries.
            ("dh_fixperms", vec!["-Xld-linux"]),
            (
                "dh_makeshlibs",
                vec![&only_library[..], "-V", &library_dependency],
            ),
            (
                "dh_makeshlibs",
                only_new_libraries.each_ref().map(String::as_str).into(),
            ),
            ("dh_shlibdeps", vec![&without_criu]),
            ("dh_installdeb", vec![]),
            ("dh_gencontrol", vec!["--", &pvm, &criu]),
            ("dh_md5sums", vec![]),
            ("dh_builddeb", vec![&destination, "--", "-Zxz", level]),
        ]);
        for (program, arguments) in steps {
            capture(
                Command::new(program)
                    .args(arguments)
                    .current_dir(&self.folder)
                    .env("SOURCE_DATE_EPOCH", self.release.epoch.to_string())
                    // The compressed blocks would depend on the number of processors.
                    .env("DPKG_DEB_THREADS_MAX", "1")
                    .env("DPKG_BUILD_API", "1")
                    // `dh_python3` does not determine the architecture.
                    .env("DEB_HOST_ARCH", "amd64")
                    .env("LC_ALL", "C.UTF-8"),
            )?;
        }
        Ok(())
    }
}

fn maintainer() -> String {
    let variable =
        |name: &str, default: &str| std::env::var(name).unwrap_or_else(|_| default.into());
    format!(
        "{} <{}>",
        variable("DEBFULLNAME", DEFAULT_MAINTAINER.0),
        variable("DEBEMAIL", DEFAULT_MAINTAINER.1)
    )
}

/// Indents a text for a field of `debian/copyright`. An empty line becomes a dot.
fn indented(text: &str) -> String {
    let lines: Vec<String> = text
        .trim()
        .lines()
        .map(|line| match line.trim_end() {
            "" => " .".to_string(),
            line => format!(" {line}"),
        })
        .collect();
    lines.join("\n")
}

/// Lets a file for pkg-config name the places of the packages.
fn set_package_config_prefix(path: &Path) -> Result<()> {
    let text = fs::read_to_string(path)?;
    let lines: Vec<String> = text
        .lines()
        .map(|line| match line.split_once('=') {
            Some(("prefix", _)) => "prefix=/usr".to_string(),
            Some(("libdir", _)) => format!("libdir=${{prefix}}/lib/{TRIPLET}"),
            _ => line.to_string(),
        })
        .collect();
    fs::write(path, lines.join("\n") + "\n")?;
    Ok(())
}

/// Returns the paths, relative to `root`, of all files and links below `root/folder`, sorted.
pub(crate) fn files_below(root: &Path, folder: &Path) -> Result<Vec<PathBuf>> {
    let absolute_folder = root.join(folder);
    let mut paths = Vec::new();
    for entry in
        fs::read_dir(&absolute_folder).with_context(|| absolute_folder.display().to_string())?
    {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            paths.extend(files_below(root, &path)?);
        } else {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(parent).with_context(|| parent.display().to_string())
}

fn copy(source: &Path, target: &Path) -> Result<()> {
    make_parent(target)?;
    fs::copy(source, target)
        .with_context(|| format!("{} to {}", source.display(), target.display()))?;
    Ok(())
}

fn link(target: &str, path: &Path) -> Result<()> {
    make_parent(path)?;
    symlink(target, path).with_context(|| path.display().to_string())
}
