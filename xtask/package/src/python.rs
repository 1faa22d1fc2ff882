//! The Python module `sempa_pvm`: its files as Debian's package has them, and the wheel.
//!
//! The native part is the library that cargo has built with the programs. `wheel pack` of the
//! Debian package python3-wheel makes the archive and the list of checksums in the wheel. maturin
//! would compile all crates of the native part once more.

use crate::debian::{Release, files_below};
use crate::process::{capture, run};
use crate::remove_folder;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask_install::project_folder;

/// Cargo package of the native part.
pub(crate) const PYTHON_PACKAGE: &str = "sempa-pvm-python";
/// File name of the native part in a build.
const LIBRARY: &str = "libsempa_pvm.so";
/// Name of the module's folder.
const MODULE: &str = "sempa_pvm";
/// File name by which Python finds the native part: any version of Python that has the stable ABI.
const NATIVE_MODULE: &str = "_native.abi3.so";
/// Python of the distribution, which has the packages of the distribution.
const SYSTEM_PYTHON: &str = "/usr/bin/python3";
/// Libraries that every Linux of the wheel's platform has, from the rules for `manylinux`.
const LIBRARIES_OF_PLATFORM: [&str; 4] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
];

/// The fields of `python/pyproject.toml` that describe the package.
#[derive(Deserialize)]
struct Manifest {
    project: Project,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Project {
    name: String,
    description: String,
    readme: String,
    requires_python: String,
    license: String,
    #[serde(default)]
    classifiers: Vec<String>,
    #[serde(default)]
    dependencies: Vec<String>,
    #[serde(default)]
    optional_dependencies: BTreeMap<String, Vec<String>>,
}

/// Program that installs a module, as the module's description names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Installer {
    /// dpkg, which knows the files of the module.
    Debian,
    /// A program that adds its name and the list of files itself, such as pip.
    OfWheel,
}

/// The module of one build, with its description.
pub(crate) struct PythonModule {
    library: PathBuf,
    project: Project,
    readme: String,
}

impl PythonModule {
    /// Finds the module of a build.
    ///
    /// # Errors
    /// The native part was not built, or the description of the module cannot be read.
    pub(crate) fn new(build_folder: &Path) -> Result<Self> {
        let library = build_folder.join(LIBRARY);
        if !library.exists() {
            bail!(
                "{} was not built: cargo build -p {PYTHON_PACKAGE}",
                library.display()
            );
        }
        let folder = project_folder().join("python");
        let path = folder.join("pyproject.toml");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let manifest: Manifest =
            toml::from_str(&text).with_context(|| path.display().to_string())?;
        let project = manifest.project;
        let readme = folder.join(&project.readme);
        let readme = fs::read_to_string(&readme).with_context(|| readme.display().to_string())?;
        Ok(Self {
            library,
            project,
            readme,
        })
    }

    /// Writes the module and its description below a folder from which Python imports.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub(crate) fn write_tree(&self, folder: &Path, installer: Installer) -> Result<()> {
        let module = folder.join(MODULE);
        let sources = project_folder().join("python/python").join(MODULE);
        for path in files_below(&sources, Path::new(""))? {
            let is_made_by_python = path
                .components()
                .any(|part| part.as_os_str() == "__pycache__");
            if is_made_by_python || path.extension().is_some_and(|ending| ending == "so") {
                continue;
            }
            let target = module.join(&path);
            fs::create_dir_all(target.parent().unwrap_or(&module))?;
            fs::copy(sources.join(&path), &target).with_context(|| target.display().to_string())?;
        }
        let native_module = module.join(NATIVE_MODULE);
        fs::copy(&self.library, &native_module)
            .with_context(|| native_module.display().to_string())?;
        run(Command::new("strip")
            .arg("--strip-unneeded")
            .arg(&native_module))?;
        let description = folder.join(format!("{MODULE}-{}.dist-info", version()));
        fs::create_dir_all(&description)?;
        fs::write(description.join("METADATA"), self.metadata())?;
        fs::write(description.join("WHEEL"), self.wheel_text()?)?;
        match installer {
            Installer::Debian => fs::write(description.join("INSTALLER"), "debian\n")?,
            Installer::OfWheel => {
                for license in ["LICENSE-MIT", "LICENSE-APACHE"] {
                    fs::copy(project_folder().join(license), description.join(license))?;
                }
            }
        }
        Ok(())
    }

    /// Makes the wheel in the folder `out` and returns its path. `folder` is for temporary files.
    ///
    /// # Errors
    /// The package python3-wheel is missing, or a file cannot be written.
    pub(crate) fn make_wheel(
        &self,
        release: &Release,
        folder: &Path,
        out: &Path,
    ) -> Result<PathBuf> {
        remove_folder(folder)?;
        self.write_tree(folder, Installer::OfWheel)?;
        let mut pack = Command::new(SYSTEM_PYTHON);
        pack.args(["-m", "wheel", "pack", "--dest-dir"])
            .arg(out)
            .arg(folder)
            .env("SOURCE_DATE_EPOCH", release.epoch.to_string());
        capture(&mut pack).context("the wheel cannot be made; is python3-wheel installed?")?;
        let name = format!("{MODULE}-{}-{}.whl", version(), self.tag()?);
        let wheel = out.join(name);
        if !wheel.exists() {
            bail!("wheel pack made another file than {}", wheel.display());
        }
        Ok(wheel)
    }

    /// Returns the description of the module in the form of Python's packages.
    fn metadata(&self) -> String {
        let project = &self.project;
        let mut lines = vec![
            "Metadata-Version: 2.1".to_string(),
            format!("Name: {}", project.name),
            format!("Version: {}", version()),
            format!("Summary: {}", project.description),
            format!("License: {}", project.license),
        ];
        let classifiers = project.classifiers.iter();
        lines.extend(classifiers.map(|name| format!("Classifier: {name}")));
        lines.push(format!("Requires-Python: {}", project.requires_python));
        let dependencies = project.dependencies.iter();
        lines.extend(dependencies.map(|name| format!("Requires-Dist: {name}")));
        for (extra, dependencies) in &project.optional_dependencies {
            lines.push(format!("Provides-Extra: {extra}"));
            for name in dependencies {
                lines.push(format!("Requires-Dist: {name}; extra == '{extra}'"));
            }
        }
        lines.push("Description-Content-Type: text/markdown".to_string());
        format!("{}\n\n{}", lines.join("\n"), self.readme)
    }

    fn wheel_text(&self) -> Result<String> {
        Ok(format!(
            "Wheel-Version: 1.0\nGenerator: sempa-xtask-package ({})\nRoot-Is-Purelib: false\nTag: {}\n",
            version(),
            self.tag()?
        ))
    }

    /// Returns the versions of Python and the platforms on which the module runs, as the name of a
    /// wheel has them.
    fn tag(&self) -> Result<String> {
        let python = self
            .project
            .requires_python
            .strip_prefix(">=")
            .context("requires-python in pyproject.toml does not begin with >=")?;
        let mut list = Command::new("objdump");
        list.arg("-p").arg(&self.library);
        let (libraries, glibc) = needs_of(&capture(&mut list)?);
        let is_other = |name: &&String| !LIBRARIES_OF_PLATFORM.contains(&name.as_str());
        if let Some(library) = libraries.iter().find(is_other) {
            bail!("the native module needs {library}, which not every Linux has");
        }
        let minor = glibc.context("the native module needs no version of the C library")?;
        let python = python.replace('.', "");
        Ok(format!("cp{python}-abi3-manylinux_2_{minor}_x86_64"))
    }
}

/// Returns the names of the libraries that an object needs, and the second number of the newest
/// version 2.x of glibc among its references. `headers` is the output of `objdump -p`.
fn needs_of(headers: &str) -> (Vec<String>, Option<u32>) {
    let words: Vec<&str> = headers.split_whitespace().collect();
    let needed = words.windows(2).filter(|pair| pair[0] == "NEEDED");
    let libraries = needed.map(|pair| pair[1].to_string()).collect();
    let minor_number = |word: &&str| {
        let numbers = word.strip_prefix("GLIBC_2.")?;
        numbers.split('.').next()?.parse::<u32>().ok()
    };
    (libraries, words.iter().filter_map(minor_number).max())
}

fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_version_of_the_c_library_decides() {
        let headers = "Dynamic Section:\n  NEEDED               libc.so.6\n\nVersion References:\n  \
                       required from libc.so.6:\n    0x069691b4 0x00 05 GLIBC_2.34\n    \
                       0x09691a75 0x00 04 GLIBC_2.2.5\n    0x069691b3 0x00 02 GLIBC_2.33\n";
        assert_eq!(needs_of(headers), (vec!["libc.so.6".to_string()], Some(34)));
        assert_eq!(needs_of(""), (Vec::new(), None));
    }
}
