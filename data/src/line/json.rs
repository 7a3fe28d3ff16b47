//! JSON of one line, with lists of numbers kept as such: a long line of token ids costs 8 bytes an id.

use std::fmt;

use indexmap::IndexMap;
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, MapAccess, SeqAccess, Visitor},
};

/// The fields of an object, in their order. A field given twice is an error.
pub(crate) type Fields = IndexMap<String, Json>;

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Json {
    Null,
    Flag(bool),
    Integer(i64),
    Number(f64),
    Text(String),
    /// Also the empty list.
    Integers(Vec<i64>),
    /// At least one is not an integer; `null` among numbers is NaN.
    Numbers(Vec<f64>),
    Flags(Vec<bool>),
    /// Any other list.
    List(Vec<Json>),
    Object(Fields),
}

impl Json {
    /// What it is, for messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Null => "null".to_owned(),
            Self::Flag(flag) => flag.to_string(),
            Self::Integer(number) => number.to_string(),
            Self::Number(number) => number.to_string(),
            Self::Text(text) => format!("the string {:?}", shortened(text)),
            Self::Integers(list) => format!("a list of {} integers", list.len()),
            Self::Numbers(list) => format!("a list of {} numbers, not all integers", list.len()),
            Self::Flags(list) => format!("a list of {} booleans", list.len()),
            Self::List(list) => format!("a list of {} values", list.len()),
            Self::Object(_) => "an object".to_owned(),
        }
    }

    fn appended(self, item: Self) -> Self {
        match (self, item) {
            (Self::Integers(mut list), Self::Integer(number)) => {
                list.push(number);
                Self::Integers(list)
            }
            (Self::Numbers(mut list), item @ (Self::Integer(_) | Self::Number(_) | Self::Null)) => {
                list.push(item.number());
                Self::Numbers(list)
            }
            (Self::Integers(list), item @ (Self::Number(_) | Self::Null)) => {
                let mut numbers: Vec<f64> = list.into_iter().map(|n| n as f64).collect();
                numbers.push(item.number());
                Self::Numbers(numbers)
            }
            (Self::Integers(list), Self::Flag(flag)) if list.is_empty() => Self::Flags(vec![flag]),
            (Self::Flags(mut list), Self::Flag(flag)) => {
                list.push(flag);
                Self::Flags(list)
            }
            (list, item) => {
                let mut items = list.into_items();
                items.push(item);
                Self::List(items)
            }
        }
    }

    fn number(&self) -> f64 {
        match self {
            Self::Integer(number) => *number as f64,
            Self::Number(number) => *number,
            _ => f64::NAN,
        }
    }

    fn into_items(self) -> Vec<Self> {
        match self {
            Self::Integers(list) => list.into_iter().map(Self::Integer).collect(),
            Self::Numbers(list) => list
                .into_iter()
                .map(|n| {
                    if n.is_nan() {
                        Self::Null
                    } else {
                        Self::Number(n)
                    }
                })
                .collect(),
            Self::Flags(list) => list.into_iter().map(Self::Flag).collect(),
            Self::List(list) => list,
            other => vec![other],
        }
    }
}

fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Json, E> {
        Ok(Json::Flag(flag))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Json, E> {
        Ok(Json::Integer(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
        Ok(i64::try_from(number).map_or(Json::Number(number as f64), Json::Integer))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Json, E> {
        Ok(Json::Number(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Json, E> {
        Ok(Json::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut list = Json::Integers(Vec::new());
        while let Some(item) = items.next_element()? {
            list = list.appended(item);
        }
        Ok(list)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut fields = Fields::new();
        while let Some((key, value)) = entries.next_entry::<String, Json>()? {
            if fields.contains_key(&key) {
                return Err(A::Error::custom(format_args!(
                    "the field `{key}` is given twice"
                )));
            }
            fields.insert(key, value);
        }
        Ok(Json::Object(fields))
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Flag(flag) => serializer.serialize_bool(*flag),
            Self::Integer(number) => serializer.serialize_i64(*number),
            Self::Number(number) if number.is_nan() => serializer.serialize_unit(),
            Self::Number(number) => serializer.serialize_f64(*number),
            Self::Text(text) => serializer.serialize_str(text),
            Self::Integers(list) => list.serialize(serializer),
            Self::Numbers(_) => self.clone().into_items().serialize(serializer),
            Self::Flags(list) => list.serialize(serializer),
            Self::List(list) => list.serialize(serializer),
            Self::Object(fields) => fields.serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_the_narrowest_kind_and_round_trip() {
        let cases = [
            ("[]", Json::Integers(vec![])),
            ("[1,-2]", Json::Integers(vec![1, -2])),
            ("[1,2.5,3]", Json::Numbers(vec![1.0, 2.5, 3.0])),
            ("[true,false]", Json::Flags(vec![true, false])),
            (
                "[[1],[2]]",
                Json::List(vec![Json::Integers(vec![1]), Json::Integers(vec![2])]),
            ),
            (
                "[1,true]",
                Json::List(vec![Json::Integer(1), Json::Flag(true)]),
            ),
            ("18446744073709551615", Json::Number(18446744073709551615.0)),
        ];
        for (text, expected) in cases {
            let found: Json = serde_json::from_str(text).unwrap();
            assert_eq!(found, expected, "{text}");
            let again: Json =
                serde_json::from_str(&serde_json::to_string(&found).unwrap()).unwrap();
            assert_eq!(again, expected, "{text}");
        }
    }

    #[test]
    fn null_among_numbers_is_nan_and_comes_out_as_null() {
        let list: Json = serde_json::from_str("[null,-0.5]").unwrap();
        assert!(matches!(&list, Json::Numbers(n) if n[0].is_nan() && n[1] == -0.5));
        assert_eq!(serde_json::to_string(&list).unwrap(), "[null,-0.5]");
    }

    #[test]
    fn a_field_given_twice_is_an_error() {
        let error = serde_json::from_str::<Json>(r#"{"tokens":[1],"tokens":[2]}"#).unwrap_err();
        assert!(
            error.to_string().contains("`tokens` is given twice"),
            "{error}"
        );
    }
}
