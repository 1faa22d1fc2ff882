//! The PVM options of the console's own task (`getopt`, `setopt`).

/// Name, initial value, minimum and maximum of each option.
const OPTIONS: [(&str, i32, i32, i32); 23] = [
    ("PvmRoute", 1, 1, 3),
    ("PvmDebugMask", 0, i32::MIN, i32::MAX),
    ("PvmAutoErr", 1, i32::MIN, i32::MAX),
    ("PvmOutputTid", -1, i32::MIN, i32::MAX),
    ("PvmOutputCode", 0, i32::MIN, i32::MAX),
    ("PvmTraceTid", -1, i32::MIN, i32::MAX),
    ("PvmTraceCode", 0, i32::MIN, i32::MAX),
    ("PvmTraceBuffer", 0, i32::MIN, i32::MAX),
    ("PvmTraceOptions", 1, 1, 3),
    ("PvmFragSize", 4080, 52, 1_048_576),
    ("PvmResvTids", 1, i32::MIN, i32::MAX),
    ("PvmSelfOutputTid", -1, i32::MIN, i32::MAX),
    ("PvmSelfOutputCode", 0, i32::MIN, i32::MAX),
    ("PvmSelfTraceTid", -1, i32::MIN, i32::MAX),
    ("PvmSelfTraceCode", 0, i32::MIN, i32::MAX),
    ("PvmSelfTraceBuffer", 0, i32::MIN, i32::MAX),
    ("PvmSelfTraceOptions", 0, i32::MIN, i32::MAX),
    ("PvmShowTids", 1, i32::MIN, i32::MAX),
    ("PvmOutputContext", 0, i32::MIN, i32::MAX),
    ("PvmTraceContext", 0, i32::MIN, i32::MAX),
    ("PvmSelfOutputContext", 0, i32::MIN, i32::MAX),
    ("PvmSelfTraceContext", 0, i32::MIN, i32::MAX),
    ("PvmNoReset", 1, 0, 1),
];

/// Option that `trace buf` sets.
pub(crate) const TRACE_BUFFER: &str = "PvmTraceBuffer";
/// Option that `trace opt` sets.
pub(crate) const TRACE_DETAIL: &str = "PvmTraceOptions";

/// Returns the names of all options.
pub(crate) fn option_names() -> impl Iterator<Item = &'static str> {
    OPTIONS.iter().map(|option| option.0)
}

/// Reason why an option was not shown or set. The console prints the text without a prefix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OptionError {
    #[error("PVM Option \"{0}\" Unknown.")]
    Unknown(String),
    /// The value is out of range. The option is not changed.
    #[error("setopt: {name} must be from {min} to {max}")]
    Range {
        name: &'static str,
        min: i32,
        max: i32,
    },
}

/// Current values, in the order of [`OPTIONS`].
#[derive(Clone, Debug)]
pub(crate) struct Options {
    values: [i32; OPTIONS.len()],
}

impl Default for Options {
    fn default() -> Self {
        Self {
            values: OPTIONS.map(|(_, value, _, _)| value),
        }
    }
}

impl Options {
    fn option_index(name: &str) -> Result<usize, OptionError> {
        OPTIONS
            .iter()
            .position(|option| option.0 == name)
            .ok_or_else(|| OptionError::Unknown(name.to_string()))
    }

    /// Returns the name and the value of one option, or of all options if `name` is `None`.
    pub(crate) fn get(&self, name: Option<&str>) -> Result<Vec<(&'static str, i32)>, OptionError> {
        let name_and_value = |index: usize| (OPTIONS[index].0, self.values[index]);
        match name {
            Some(name) => Self::option_index(name).map(|index| vec![name_and_value(index)]),
            None => Ok((0..OPTIONS.len()).map(name_and_value).collect()),
        }
    }

    /// Returns the value of an existing option.
    ///
    /// # Panics
    /// Panics if no option has this name.
    pub(crate) fn value(&self, name: &str) -> i32 {
        Self::option_index(name)
            .map(|index| self.values[index])
            .expect("the caller names an option")
    }

    /// Sets an option and returns its previous value.
    pub(crate) fn set(&mut self, name: &str, value: i32) -> Result<i32, OptionError> {
        let index = Self::option_index(name)?;
        let (name, _, min, max) = OPTIONS[index];
        if !(min..=max).contains(&value) {
            return Err(OptionError::Range { name, min, max });
        }
        Ok(std::mem::replace(&mut self.values[index], value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_match_pvm() {
        let mut options = Options::default();
        assert_eq!(options.get(Some("PvmRoute")), Ok(vec![("PvmRoute", 1)]));
        assert_eq!(options.get(None).expect("all").len(), 23);
        assert_eq!(options.set("PvmRoute", 3), Ok(1));
        assert_eq!(options.set("PvmRoute", 2), Ok(3));
        assert_eq!(options.value("PvmRoute"), 2);
        let error = options.set("foo", 1).expect_err("unknown");
        assert_eq!(error.to_string(), "PVM Option \"foo\" Unknown.");
        assert!(options.set("PvmFragSize", 7).is_err());
    }
}
